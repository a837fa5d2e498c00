"""Building this rank's part of the Megatron-Core model from a model's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.config.schema import Fp8Config, LoraConfig, ParallelConfig, QuantizationFormat
from megatron_grpo.platform.device import current_platform
from megatron_grpo.trainer.model.decoder import DecoderModel
from megatron_grpo.trainer.model.experts import mark_experts
from megatron_grpo.trainer.model.fp8 import keep_outer_layers
from megatron_grpo.trainer.model.layer_spec import Additions, layer_spec, uses_transformer_engine
from megatron_grpo.trainer.model.lora import train_adapters_alone
from megatron_grpo.trainer.model.megatron_fields import fp8_settings, made, require_fp8
from megatron_grpo.trainer.model.rotary import GlobalAndLocalRotary, RotaryAtPositions, scaled_rope_frequencies
from megatron_grpo.weights.families.family import padded_vocab
from megatron_grpo.weights.shape import ModelShape


def build_model(
    shape: ModelShape,
    parallel: ParallelConfig,
    *,
    precision: Literal["float32", "bfloat16"],
    activation_checkpointing: bool = False,
    fields: Mapping[str, Any] | None = None,
    lora: LoraConfig | None = None,
    fp8: Fp8Config | None = None,
    quantization: QuantizationFormat | None = None,
) -> list[DecoderModel]:
    """A rank's shard of the model on the platform's device, its weights not yet set: a chunk, or several that the
    microbatches pass in turn (virtual pipeline).

    The last chunk of the last stage, `chunk(token_ids, position_ids, None)`, gives logits [sequences, length, columns],
    columns being padded vocabulary / TP; those past the vocabulary have to be left out of every sum over it. Packed
    sequences (`PackedSequences`) are given as one sequence, [1, tokens]; with `rows` it ends in hidden states.

    Args:
        shape: sizes of the model.
        parallel: the layout that `initialize_parallel` was called with.
        precision: dtype of weights and activations.
        activation_checkpointing: recompute every layer in the backward pass.
        fields: of Megatron-Core's TransformerConfig (`transformer_fields`), in place of the defaults here.
        lora: adapters, which alone are trained then; None, or a rank of 0: none.
        fp8: whether the layers' products are in FP8; None: they are not.
        quantization: what the operands of the layers' products are rounded to, by modelopt; None: they are not.

    Raises:
        RunError: FP8 is asked for, and this rank's device or packages do not have it.
    """
    additions = Additions(lora or LoraConfig(), fp8 or Fp8Config(), quantization)
    require_fp8(additions.fp8, shape)
    config = transformer_config(shape, parallel, precision, activation_checkpointing, additions.fp8, fields or {})
    number = parallel.virtual_pipeline
    return [_build_chunk(config, shape, parallel, chunk if number > 1 else None, additions) for chunk in range(number)]


def _build_chunk(
    config: TransformerConfig,
    shape: ModelShape,
    parallel: ParallelConfig,
    vp_stage: int | None,
    additions: Additions,
) -> DecoderModel:
    """One chunk of the rank's shard; vp_stage None: the only one."""
    model = DecoderModel(
        config=config,
        transformer_layer_spec=layer_spec(config, shape, vp_stage, additions),
        vocab_size=padded_vocab(shape, parallel.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        vp_stage=vp_stage,
    )
    mark_experts(model)
    if shape.rope_scaling is not None:
        model.rotary_pos_emb.inv_freq = scaled_rope_frequencies(shape).to(current_platform().device)
    if not uses_transformer_engine(shape):
        model.rotary_pos_emb = _rotary_at_positions(model.rotary_pos_emb, shape)
    if shape.embedding_scale is not None and model.pre_process:
        _scale_embeddings(model.embedding, shape.embedding_scale, config.params_dtype)
    if additions.lora.rank:
        train_adapters_alone(model)
    if additions.fp8.simulated:
        keep_outer_layers(model, shape.layers, additions.fp8)
    return model


def _rotary_at_positions(rotary: RotaryEmbedding, shape: ModelShape) -> RotaryAtPositions | GlobalAndLocalRotary:
    everywhere = RotaryAtPositions(rotary)
    if shape.local_rope_theta is None:
        return everywhere
    local = RotaryEmbedding(
        shape.head_dim,
        rotary_percent=1.0,
        rotary_base=shape.local_rope_theta,
        use_cpu_initialization=current_platform().name == "cpu",
        cp_group=rotary.cp_group,
    )
    return GlobalAndLocalRotary(everywhere, RotaryAtPositions(local))


def _scale_embeddings(embedding: torch.nn.Module, scale: float, dtype: torch.dtype) -> None:
    """Multiply what an embedding gives, [length, sequences, hidden], by a factor that is rounded to its dtype first."""
    rounded = float(torch.tensor(scale, dtype=dtype))
    embedding.register_forward_hook(lambda _module, _given, embedded: embedded * rounded)


def transformer_config(
    shape: ModelShape,
    parallel: ParallelConfig,
    precision: Literal["float32", "bfloat16"],
    activation_checkpointing: bool,
    fp8: Fp8Config,
    fields: Mapping[str, Any],
) -> TransformerConfig:
    """Megatron-Core's settings for a dense decoder without dropout; `fields` are the user's, which count more."""
    dtype = getattr(torch, precision)
    ours: dict[str, Any] = dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn_hidden,
        num_attention_heads=shape.attention_heads,
        num_query_groups=shape.key_value_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **_parallel_settings(parallel),
        bf16=precision == "bfloat16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        # Initialisation also marks which parameters are split over TP (without the marks, gradient norms leave the
        # other ranks' shards out), so it has to run, but it need not draw values that load_hf_weights overwrites.
        perform_initialization=True,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        # The default dispatcher refuses variable_seq_lengths, even of a model without experts.
        moe_token_dispatcher_type="alltoall",
        **_expert_settings(shape),
        recompute_granularity="full" if activation_checkpointing else None,
        recompute_method="uniform" if activation_checkpointing else None,
        recompute_num_layers=1 if activation_checkpointing else None,
        **_family_settings(shape),
        **fp8_settings(fp8),
        **_platform_settings(shape, interleaved=parallel.virtual_pipeline > 1),
    )
    return made(TransformerConfig, ours, fields)


def _parallel_settings(parallel: ParallelConfig) -> dict[str, Any]:
    """Megatron-Core's settings for the layout of a model over its ranks."""
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "account_for_embedding_in_pipeline_split": parallel.count_embedding,
        "account_for_loss_in_pipeline_split": parallel.count_loss,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence and parallel.tensor > 1,
    }


def _expert_settings(shape: ModelShape) -> dict[str, Any]:
    """Megatron-Core's settings for a mixture of experts, without the losses and updates that `ExpertRouter` owns."""
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn_hidden,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden or None,
        "moe_layer_freq": [int(one) for one in experts.layers],
        "moe_router_topk": experts.top_k,
        "moe_router_score_function": experts.score,
        # Softmax over the chosen logits alone is softmax over all of them, scaled so that the chosen add up to one.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalised,
        "moe_router_topk_scaling_factor": experts.scaling if experts.scaling != 1.0 else None,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.top_groups if experts.groups > 1 else None,
        "moe_router_enable_expert_bias": experts.selection_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": uses_transformer_engine(shape),
    }


def _leave_as_is(weight: Tensor) -> None:
    """Initialisation of weights that are about to be loaded: does nothing to a weight of any shape [...] and dtype."""


def _family_settings(shape: ModelShape) -> dict[str, Any]:
    """What not all families do alike."""
    return {
        "activation_func": {"silu": F.silu, "gelu_tanh": gelu_tanh}[shape.activation],
        "layernorm_zero_centered_gamma": shape.zero_centered_norms,
        "softmax_scale": shape.softmax_scale,
        # Megatron-Core counts the tokens before and after the own one, and marks the layers that have the window.
        "window_size": None if shape.window is None else (shape.window - 1, 0),
        "window_attn_skip_freq": [int(windowed) for windowed in shape.windowed] or None,
    }


def gelu_tanh(gate: Tensor) -> Tensor:
    """x Phi(x) in its approximation by tanh (Hendrycks and Gimpel 2016), [...], in the dtype of `gate`."""
    return F.gelu(gate, approximate="tanh")


def _platform_settings(shape: ModelShape, *, interleaved: bool) -> dict[str, Any]:
    """Fused kernels where there is a GPU for them."""
    cuda = current_platform().name == "cuda"
    engine = uses_transformer_engine(shape)
    return {
        "apply_rope_fusion": engine,
        "bias_activation_fusion": cuda and shape.activation == "silu",
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        # Not used; the default value warns that it is deprecated.
        "cuda_graph_scope": [],
        "persist_layer_norm": False,
        # Needs a CUDA extension from apex; policy.gradient_accumulation_fusion looks for it.
        "gradient_accumulation_fusion": False,
        # gloo has no batches of sends and receives; and of two interleaved stages, where both directions have one peer,
        # a batch mixes them up.
        "batch_p2p_comm": cuda and not interleaved,
        "batch_p2p_sync": cuda,
    }


class ValueHead(torch.nn.Module):
    """A number for each token: hidden state times weight plus bias, in float32, equal on all tensor-parallel ranks.

    It is given whole hidden states, also with sequence parallelism (`DecoderModel.rows`): every rank computes all of
    the head and its gradient.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        placed = {"dtype": config.params_dtype, "device": current_platform().device}
        weight: Any = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **placed))
        bias: Any = torch.nn.Parameter(torch.zeros(1, **placed))
        self.weight, self.bias = weight, bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden], any float type, to the value after each token: [rows], float32."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]


def build_value_model(
    shape: ModelShape,
    parallel: ParallelConfig,
    *,
    precision: Literal["float32", "bfloat16"],
    activation_checkpointing: bool = False,
    fields: Mapping[str, Any] | None = None,
) -> list[DecoderModel]:
    """The chunks of a rank's shard of the value model, the backbone's weights not yet set, the head's zero.

    The last chunk of the last pipeline stage ends in hidden states (`DecoderModel.rows`), which its `output_layer`
    makes values of: what is known after each token.

    Args:
        shape: sizes of the value model, from `as_value_model`.
        parallel: the layout that `initialize_parallel` was called with.
        precision: dtype of weights and activations.
        activation_checkpointing: recompute every layer in the backward pass.
        fields: of Megatron-Core's TransformerConfig (`transformer_fields`), in place of the defaults of `build_model`.
    """
    chunks = build_model(
        shape, parallel, precision=precision, activation_checkpointing=activation_checkpointing, fields=fields
    )
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config)
    return chunks
