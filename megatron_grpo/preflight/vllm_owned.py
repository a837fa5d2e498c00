"""The arguments of vLLM that a run sets itself, and what to do instead of passing them on."""

from __future__ import annotations

_DATA = "give generation.parallel.data, whose engines know nothing of each other"
_RANKS = "an engine's ranks are generation.parallel.tensor * pipeline, placed by the run"
_FOLDER = "the model and its tokenizer are those of policy.model.path"
_SPECULATION = "give generation.engine.speculative; a draft model would not be refitted"
_PUBLISHED = "weights come from the policy by the refit"


def _all(names: str, text: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), text)


OWNED: dict[str, str] = {
    **_all("model model_weights tokenizer hf_config_path skip_tokenizer_init revision tokenizer_revision", _FOLDER),
    **_all("code_revision trust_remote_code", "code that comes with a model is never run"),
    **_all("runner convert", "an engine generates"),
    "dtype": "give generation.engine.dtype, or policy.precision",
    "seed": "every response has a seed of its own, from grpo.seed",
    "max_model_len": "give policy.max_total_sequence_length",
    "tensor_parallel_size": "give generation.parallel.tensor",
    "pipeline_parallel_size": "give generation.parallel.pipeline",
    "enable_expert_parallel": "give generation.parallel.expert",
    **_all(
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "data_parallel_backend",
        _DATA,
    ),
    **_all(
        "prefill_context_parallel_size decode_context_parallel_size distributed_executor_backend master_addr "
        "master_port nnodes node_rank device_ids worker_cls",
        _RANKS,
    ),
    "max_num_seqs": "give generation.engine.max_num_seqs, or generation.generation_batch_size",
    "max_num_batched_tokens": "give generation.engine.max_num_batched_tokens",
    "enable_chunked_prefill": "give generation.engine.enable_chunked_prefill",
    "enable_prefix_caching": "give generation.engine.enable_prefix_caching",
    "enforce_eager": "give generation.engine.enforce_eager",
    "gpu_memory_utilization": "give generation.engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "give generation.engine.kv_cache_gib, or gpu_memory_utilization on GPUs",
    **_all("speculative_config spec_method spec_model spec_tokens", _SPECULATION),
    "logprobs_mode": "training needs the log-probabilities that tokens are drawn with",
    **_all("weight_transfer_config worker_extension_cls", _PUBLISHED),
    "enable_lora": "policy.lora's adapters are in the weights that a refit sends",
    **_all("enable_return_routed_experts aux_output_config", "give policy.moe.replay_routing"),
    "enable_sleep_mode": "give generation.placement=colocated, with which engines sleep while models train",
    "additional_config": "it is what the run tells its workers",
    "disable_log_stats": "statistics are in metrics.jsonl",
}
"""The refused arguments, each with what is said of it."""
