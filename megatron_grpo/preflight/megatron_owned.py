"""The fields of Megatron-Core that a run sets itself, and what to do instead of passing them on."""

from __future__ import annotations

_SIZE = "comes from the model's config.json"
_SUM = "losses are divided by counts over the whole optimizer step, and gradients are only ever summed"
_LOADED = "weights are loaded, so their initialisation is left out"
_FSDP = "weights and checkpoints are those of Megatron-Core's DistributedDataParallel"
_REPEATS = "log-probabilities have to repeat: there is no dropout"
_SHAPES = "pipeline stages tell each other the shapes of what they send"


def _all(names: str, text: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), text)


OWNED: dict[str, dict[str, str]] = {
    "megatron": {
        **_all(
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
            "layernorm_epsilon qk_layernorm qk_l2_norm gated_linear_unit activation_func add_bias_linear add_qkv_bias "
            "rotary_interleaved window_size window_attn_skip_freq multi_latent_attention softmax_scale num_moe_experts "
            "moe_ffn_hidden_size moe_router_topk moe_shared_expert_intermediate_size moe_shared_expert_gate "
            "moe_layer_freq moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_latent_size "
            "moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias mtp_num_layers "
            "layernorm_zero_centered_gamma experimental_attention_variant attention_output_gate is_hybrid_model "
            "heterogeneous_block_specs no_rope_freq linear_attention_freq activation_func_clamp_value "
            "apply_residual_connection_post_layernorm",
            _SIZE,
        ),
        "tensor_model_parallel_size": "give policy.parallel.tensor",
        "pipeline_model_parallel_size": "give policy.parallel.pipeline",
        "virtual_pipeline_model_parallel_size": "give policy.parallel.virtual_pipeline",
        "pipeline_model_parallel_layout": "give policy.parallel.first_stage_layers and last_stage_layers",
        "num_layers_in_first_pipeline_stage": "give policy.parallel.first_stage_layers",
        "num_layers_in_last_pipeline_stage": "give policy.parallel.last_stage_layers",
        "account_for_embedding_in_pipeline_split": "give policy.parallel.count_embedding",
        "account_for_loss_in_pipeline_split": "give policy.parallel.count_loss",
        "context_parallel_size": "give policy.parallel.context",
        "expert_model_parallel_size": "give policy.parallel.expert",
        "expert_tensor_parallel_size": "give policy.parallel.expert_tensor",
        "sequence_parallel": "give policy.parallel.sequence",
        **_all(
            "fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype",
            "give policy.precision",
        ),
        **_all("recompute_granularity recompute_modules moe_layer_recompute", "give policy.recompute_modules"),
        **_all("recompute_method recompute_num_layers", "give policy.activation_checkpointing"),
        "deterministic_mode": "give policy.deterministic",
        "gradient_accumulation_fusion": "give policy.gradient_accumulation_fusion",
        **_all("hidden_dropout attention_dropout", _REPEATS),
        "calculate_per_token_loss": _SUM,
        **_all("variable_seq_lengths batch_p2p_comm", _SHAPES),
        **_all(
            "perform_initialization use_cpu_initialization init_model_with_meta_device init_method_std "
            "embedding_init_method_std",
            _LOADED,
        ),
        "transformer_impl": "the layers are Transformer Engine's where it is installed and there is a GPU",
        "fp8_param": "weights are exported and published in policy.precision",
        "fp4_param": "weights are exported and published in policy.precision",
    },
    "ddp": {
        "use_distributed_optimizer": "give policy.optimizer.distributed",
        "overlap_grad_reduce": "give policy.overlap_grad_reduce",
        "overlap_param_gather": "give policy.overlap_param_gather",
        "average_in_collective": _SUM,
        "num_distributed_optimizer_instances": "all data-parallel ranks share one optimizer state",
        **_all(
            "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
            "fsdp_double_buffer fsdp_manual_registration preserve_fp32_weights keep_fp8_transpose_cache "
            "suggested_communication_unit_size",
            _FSDP,
        ),
        **_all(
            "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag",
            "weights are exported and published in policy.precision",
        ),
    },
    "megatron_optimizer": {
        "optimizer": "it is AdamW",
        "lr": "give policy.optimizer.lr",
        "min_lr": "give policy.optimizer.min_lr",
        "weight_decay": "give policy.optimizer.weight_decay",
        "adam_beta1": "give policy.optimizer.adam_beta1",
        "adam_beta2": "give policy.optimizer.adam_beta2",
        "adam_eps": "give policy.optimizer.adam_eps",
        **_all("fp16 bf16 params_dtype", "give policy.precision"),
        **_all(
            "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
            "is for float16, and policy.precision is bfloat16 or float32",
        ),
        **_all("sgd_momentum", "it is AdamW"),
        **_all(
            "muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps "
            "muon_tp_mode muon_extra_scale_factor",
            "it is AdamW",
        ),
        "use_distributed_optimizer": "give policy.optimizer.distributed",
        "clip_grad": "give policy.max_grad_norm",
        "use_precision_aware_optimizer": "give policy.optimizer.precision_aware",
        **_all("optimizer_cpu_offload optimizer_offload_fraction", "give policy.optimizer.cpu_offload"),
        "overlap_param_gather": "give policy.overlap_param_gather",
        "overlap_param_gather_with_optimizer_step": "give policy.overlap_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag": "weights are exported and published in policy.precision",
    },
}
"""By key of policy.*: the refused fields, each with what is said of it."""

CLASSES = {
    "megatron": ("transformer.transformer_config", "TransformerConfig"),
    "ddp": ("distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
    "megatron_optimizer": ("optimizer.optimizer_config", "OptimizerConfig"),
}
"""By key of policy.*: module below megatron.core, and the class in it whose fields are passed on."""
