"""Fields that users pass on to Megatron-Core and vLLM: those that the run sets itself, and checks of names and types.

Names and types are checked against the installed library's own dataclasses (`library_problems`). Their import takes
seconds and brings torch, so the callers are where the libraries are used, in a process that is started for it.
"""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from megatron_grpo.config.errors import Problem, shown
from megatron_grpo.config.schema import Config

_SIZE = "comes from the model's config.json"
_SUM = "losses are divided by counts over the whole optimizer step, and gradients are only ever summed"
_LOADED = "weights are loaded, so their initialisation is left out"
_FSDP = "weights and checkpoints are those of Megatron-Core's DistributedDataParallel"
_REPEATS = "log-probabilities have to repeat: there is no dropout"
_SHAPES = "pipeline stages tell each other the shapes of what they send"
_DATA = "give generation.parallel.data, whose engines know nothing of each other"
_RANKS = "an engine's ranks are generation.parallel.tensor * pipeline, placed by the run"
_FOLDER = "the model and its tokenizer are those of policy.model.path"
_SPECULATION = "give generation.engine.speculative; a draft model would not be refitted"
_PUBLISHED = "weights come from the policy by the refit"


def _all(names: str, text: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), text)


OWNED: dict[str, dict[str, str]] = {
    "policy.megatron": {
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
    "policy.ddp": {
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
    "policy.megatron_optimizer": {
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
    "generation.engine_args": {
        **_all("model model_weights tokenizer hf_config_path skip_tokenizer_init", _FOLDER),
        **_all("revision tokenizer_revision", _FOLDER),
        **_all("code_revision trust_remote_code", "code that comes with a model is never run"),
        **_all("runner convert", "an engine generates"),
        "dtype": "give generation.engine.dtype, or policy.precision",
        "seed": "every response has a seed of its own, from grpo.seed",
        "max_model_len": "give policy.max_total_sequence_length",
        "tensor_parallel_size": "give generation.parallel.tensor",
        "pipeline_parallel_size": "give generation.parallel.pipeline",
        "enable_expert_parallel": "give generation.parallel.expert",
        **_all(
            "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
            "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
            "data_parallel_multi_port_external_lb data_parallel_backend",
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
    },
}
"""By section: the fields that the run sets itself, each with what the user does instead."""


def passed_fields(config: Config) -> dict[str, dict[str, Any]]:
    """The fields that the user passes on, by section; sections without any are left out."""
    sections = {f"policy.{name}": getattr(config.policy, name) for name in ("megatron", "ddp", "megatron_optimizer")}
    sections["generation.engine_args"] = config.generation.engine_args
    return {section: dict(values) for section, values in sections.items() if values}


def owned_problems(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """Fields that the run sets itself.

    Args:
        sections: the fields passed on, by section (`passed_fields`).
    """
    for section, values in sections.items():
        for name, value in values.items():
            if name in OWNED[section]:
                yield Problem(f"{section}.{name}={shown(value)}", f"is set by the run itself: {OWNED[section][name]}")


def library_problems(
    section: str, values: Mapping[str, Any], annotations: Mapping[str, Any], what: str
) -> Iterator[Problem]:
    """Fields that the library does not have, or whose values are of another type.

    Args:
        section: key of the configuration that holds the fields.
        values: the fields passed on, as YAML gives them.
        annotations: the type of every field of the library's dataclass.
        what: name of a field of this class in messages, such as "argument of the installed vLLM".
    """
    free = {name for name in annotations if not name.startswith("_")} - OWNED[section].keys()
    for name, value in values.items():
        text = _mismatch(annotations[name], value) if name in free else None
        if name not in free and name not in OWNED[section]:
            text = f"is no {what}{_suggestion(name, free, f'{section}.')}"
        if text is not None:
            yield Problem(f"{section}.{name}={shown(value)}", text)


def _mismatch(annotation: Any, value: Any) -> str | None:
    """Why a value is not of a library's type; None: it is, or the library alone can tell."""
    kind = _plain(annotation)
    if not _writable(kind):
        name = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
        return f"takes a {name}, which a configuration cannot hold"
    converted = tuple(value) if isinstance(value, list) and _has_tuple(kind) else value
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True)).validate_python(converted)
    except ValidationError:
        return f"must be {_in_words(kind)}"
    except PydanticSchemaGenerationError:
        return None
    settings = {field.name for one in _members(annotation) if is_dataclass(one) for field in fields(one)}
    wrong = next((name for name in value if name not in settings), None) if isinstance(value, dict) else None
    if not settings or wrong is None:
        return None
    return f"has {wrong}, which is no setting of it{_suggestion(str(wrong), settings, '')}"


def _suggestion(name: str, known: set[str], prefix: str) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


class _Unwritable:
    """Stands in a type for what no YAML value is: a class of the library, a function."""


_DtypeName = Literal["float32", "bfloat16", "float16"]
"""How a configuration writes a torch.dtype."""


def _plain(kind: Any) -> Any:
    """A library's type as YAML can write it: enumerations and torch.dtype by name, dataclasses as mappings."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_plain, args))]  # noqa: UP007  made from a tuple
    if origin is typing.Annotated:
        return _plain(args[0])
    if isinstance(kind, str | typing.ForwardRef):  # names that the library imports for type checkers alone
        return Any
    if origin is set:
        return list[_plain(args[0])]  # type: ignore[misc,unused-ignore]
    if origin in (list, dict, tuple):
        return origin[tuple(one if one is ... else _plain(one) for one in args)]
    if isinstance(kind, enum.EnumType):
        return Literal[tuple(kind.__members__)]  # type: ignore[misc,unused-ignore]
    if isinstance(kind, type) and is_dataclass(kind):
        return dict[str, Any]
    if getattr(kind, "__module__", "") == "torch" and kind.__name__ == "dtype":
        return _DtypeName
    known = kind in (Any, object, bool, int, float, str, list, dict, tuple, None, type(None))
    return kind if known or origin is Literal else _Unwritable


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or a type by itself."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if union else (kind,)


def _in_words(kind: Any) -> str:
    """A type for a message: "true or false", "int or null", "one of fp32, fp64 or null"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if len(_members(kind)) > 1:
        return " or ".join(dict.fromkeys(_in_words(one) for one in args if one is type(None) or _writable(one)))
    if origin in (list, tuple):
        return f"list of {_in_words(args[0])}"
    if origin is dict or kind is dict:
        return "a mapping"
    return {bool: "true or false", str: "text", type(None): "null"}.get(kind) or str(getattr(kind, "__name__", kind))


def _writable(kind: Any) -> bool:
    """Whether some YAML value but null is of a type."""
    return any(one is not _Unwritable and one is not type(None) for one in _members(kind))


def _has_tuple(kind: Any) -> bool:
    return kind is tuple or typing.get_origin(kind) is tuple or any(map(_has_tuple, typing.get_args(kind)))
