"""The settings of an engine, and the vLLM arguments that follow from them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from itertools import chain
from typing import Any, get_args

from megatron_grpo.config import paths
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.generation_schema import SpeculativeConfig
from megatron_grpo.config.loop_schema import AsyncGRPOConfig
from megatron_grpo.config.passthrough import check_library_fields
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation.vllm_images import EngineImages
from megatron_grpo.models.adapter_names import choose_slot_rank
from megatron_grpo.models.adapter_slot import AdapterSlot
from megatron_grpo.models.families.reading import find_model_shape, is_untied_by_weights
from megatron_grpo.models.quantized_weights import is_quantized
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import detect_platform

# Tokens of a forward pass on a GPU, unless configured: vLLM's default for its server on an H100. For engines that are
# made in Python its default is 2048, which slows prefill, and most where the cache of all requests is computed anew.
GPU_BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """All settings of one engine, as plain values."""

    index: int = 0
    model_path: str  # folder in Hugging Face format
    config: GenerationConfig
    precision: str  # dtype of weights and activations, unless config.engine.dtype is set
    max_total_sequence_length: int  # of prompt and response together, in tokens
    routed: RoutedForm | None = None  # form of the experts recorded for responses; None: none are recorded
    in_flight: AsyncGRPOConfig | None = None  # weight changes while responses are in flight; None: only between
    awaits_refit: bool = False  # whether a refit brings all weights before the first request
    adapter: AdapterSlot | None = None  # kept beside the base model; None: refits send weights
    has_prometheus: bool = False  # whether vLLM's own figures go to Ray's Prometheus exporters
    images: EngineImages | None = None  # None: no prompt has images
    token: str | None = field(default_factory=paths.read_token, repr=False)
    """Bearer token of an external server (generation.server); None: the server requires none."""

    @property
    def sleeps(self) -> bool:
        """True if vLLM frees memory while models train (not on CPUs)."""
        return self.config.is_colocated and detect_platform().name == "cuda"

    @property
    def keeps_cache(self) -> bool:
        """True if responses keep their KV cache after a refit."""
        return self.in_flight is not None and not self.in_flight.recompute_kv_cache_after_weight_updates


def make_engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    config = settings.config
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "tokenizer_mode": "hf",  # where vllm_plugin.py puts the run's tokenizer
        # Mistral's folders hold the model twice, and vLLM would prefer params.json and consolidated.safetensors.
        "config_format": "hf",
        # "megatron_grpo": weights come with the first refit, and only what it leaves out is read (PlaceholderLoader).
        "load_format": "megatron_grpo" if settings.awaits_refit else "hf",
        "dtype": config.engine.dtype or settings.precision,
        "tensor_parallel_size": config.parallel.tensor,
        "pipeline_parallel_size": config.parallel.pipeline,
        "enable_expert_parallel": config.parallel.expert > 1,
        "max_model_len": settings.max_total_sequence_length,
        "max_num_seqs": config.sequences_per_engine,
        "enforce_eager": config.engine.enforce_eager,
        "enable_prefix_caching": config.engine.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
        "disable_log_stats": True,
        "language_model_only": True,  # of a model that also sees images only the text part is trained and refitted
        "worker_extension_cls": "megatron_grpo.weight_sync.engine_worker.RefitWorker",
    }
    if settings.images is not None:
        arguments |= settings.images.make_arguments(on_cpu=detect_platform().name == "cpu")
    if settings.adapter is not None:
        arguments |= make_adapter_arguments(settings.adapter)
    if settings.routed is not None:
        arguments["enable_return_routed_experts"] = True
    if config.engine.speculative.num_speculative_tokens:
        arguments["speculative_config"] = make_speculative_config(config.engine.speculative)
    if detect_platform().name == "cpu":
        from megatron_grpo.generation.cpu_engine import make_cpu_arguments

        arguments |= make_cpu_arguments(settings)
    else:
        executor = "mp" if config.parallel.ranks_per_engine > 1 else "uni"  # uni: in the core, without a queue between
        arguments["distributed_executor_backend"] = "ray" if needs_machines(config) else executor
        longest = 0 if config.engine.enable_chunked_prefill is not False else settings.max_total_sequence_length
        arguments["max_num_batched_tokens"] = max(GPU_BATCH_TOKENS, config.sequences_per_engine, longest)
        arguments["gpu_memory_utilization"] = config.engine.gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.is_colocated
        # No refit sends the layers that propose tokens.
        arguments["sleep_preserve_parameter_names"] = ["draft.*"] if config.is_colocated else []
    passed = {name: _convert_argument(name, value) for name, value in config.engine_args.items()}
    add_model_settings(passed, settings.model_path)
    # The policy's logits are float32, and vLLM's are the model's dtype unless told otherwise. In bfloat16, logits
    # between 16 and 32 are multiples of 1/8. vLLM's batch-invariant products do not include one with a wider result.
    if detect_platform().name == "cuda" and not config.engine.batch_invariant:
        passed["hf_overrides"] = {"head_dtype": "float32", **(passed.get("hf_overrides") or {})}
    if settings.awaits_refit and is_quantized(settings.model_path):
        # vLLM would make quantized layers, which no refit fills. So it makes plain ones for the first refit to fill.
        passed["hf_overrides"] = partial(_override_quantized, passed.get("hf_overrides") or {})
        passed["load_format"] = "megatron_grpo"
    arguments |= passed
    _set_batch_limits(arguments, settings)  # last, so that nothing that is passed on exceeds them
    return arguments


def _set_batch_limits(arguments: dict[str, Any], settings: VllmSettings) -> None:
    """Put the run's limits of a batch in place of the platform's.

    A key that is null changes nothing. vLLM warms up with a batch of the most tokens: if these were more than its
    sequences may have, block tables would be too short for them, and kernels would read past the end.
    """
    for name in ("enable_chunked_prefill", "max_num_batched_tokens"):
        if (value := getattr(settings.config.engine, name)) is not None:
            arguments[name] = value
    if "max_num_batched_tokens" in arguments:
        capacity = settings.config.sequences_per_engine * settings.max_total_sequence_length
        arguments["max_num_batched_tokens"] = min(arguments["max_num_batched_tokens"], capacity)


def make_adapter_arguments(adapter: AdapterSlot) -> dict[str, Any]:
    """Make the arguments of an engine with a slot for one adapter."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": choose_slot_rank(adapter.rank),
        "lora_target_modules": adapter.modules,
    }


def make_speculative_config(speculative: SpeculativeConfig) -> dict[str, Any]:
    # vLLM reads the layers of "mtp" from the engine's folder, and they share embedding and head with the model.
    if speculative.method == "mtp":
        return {"method": "mtp", "num_speculative_tokens": speculative.num_speculative_tokens}
    return asdict(speculative)


def add_model_settings(arguments: dict[str, Any], path: str) -> None:
    """Add the arguments without which vLLM would compute another model than transformers."""
    shape = find_model_shape(path)
    if is_untied_by_weights(path):
        # vLLM would compare head and embedding after it has rounded both, and may tie them again.
        _override(arguments, shape, {"tie_word_embeddings": False})
    if shape is not None and shape.family == "llama4":  # vLLM goes by the longest sequence, and not by config.json
        stated = arguments.get("override_generation_config") or {}
        tuning = {"attn_temperature_tuning": shape.query_scale is not None}
        arguments["override_generation_config"] = tuning | stated
    elif shape is not None and shape.query_scale is not None:  # vLLM reads it under a name that config.json lacks
        scaling = {"beta": shape.query_scale.slope, "original_max_position_embeddings": shape.query_scale.length}
        _override(arguments, shape, {"llama_4_scaling": scaling})


def _override(arguments: dict[str, Any], shape: ModelShape | None, settings: Mapping[str, Any]) -> None:
    """Add settings that replace config.json's; the user's come first."""
    stated = arguments.get("hf_overrides") or {}
    if shape is not None and shape.is_text_part:
        text = {"text_config": {**settings, **stated.get("text_config", {})}}
        arguments["hf_overrides"] = {**stated, **text}
    else:
        arguments["hf_overrides"] = {**settings, **stated}


def needs_machines(config: GenerationConfig) -> bool:
    """True in the actor of an engine that has more GPUs than a machine."""
    import ray

    # An engine that fits a machine owns its GPUs through this actor, or shares the GPUs that the actor sees; a larger
    # engine has its own placement group.
    return not config.is_colocated and len(ray.get_gpu_ids()) < config.parallel.ranks_per_engine


def _override_quantized(overrides: Mapping[str, Any], model_config: Any) -> Any:
    """Change a model's settings in vLLM to those of plain weights."""
    if hasattr(model_config, "quantization_config"):
        del model_config.quantization_config
    for name, value in overrides.items():
        part = getattr(model_config, name, None)
        if name == "text_config" and part is not None:
            part.update(value)
        else:
            model_config.update({name: value})
    return model_config


def find_passed_field_problems(sections: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Find arguments that vLLM does not know or accept."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    types = {argument.name: argument.type for argument in fields(AsyncEngineArgs)}
    subject = "an argument of the installed vLLM"
    problems = (check_library_fields(section, values, types, subject) for section, values in sections.items())
    return list(chain.from_iterable(problems))


def _convert_argument(name: str, value: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    declared = next(argument.type for argument in fields(AsyncEngineArgs) if argument.name == name)
    for candidate in (declared, *get_args(declared)):
        if isinstance(value, dict) and isinstance(candidate, type) and is_dataclass(candidate):
            return candidate(**value)
        if isinstance(value, str) and isinstance(candidate, enum.EnumType):
            return candidate[value]
    return value
