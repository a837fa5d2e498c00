"""What an engine is built from, and vLLM's arguments that follow from it."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_args

from megatron_grpo.config.schema import AsyncGRPOConfig, GenerationConfig
from megatron_grpo.generation.routed_experts import recording_arguments
from megatron_grpo.generation.vllm_plugin import WEIGHT_TRANSFER_BACKEND
from megatron_grpo.models.routed import RoutedForm
from megatron_grpo.platform.device import current_platform

CPU_BATCH_TOKENS = 4096
"""Most tokens of one forward pass of a CPU engine; more when a single sequence may be longer."""

IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""What runs a model of one rank in the engine core itself, without the messages to and from a worker.

As "uni" vLLM would take it for "mp" on a CPU, because a core that it spawns does not bind its OpenMP threads; ours do.
"""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A vLLM server that runs elsewhere."""

    url: str
    token: str | None = field(repr=False)
    """Bearer token; None: the server wants none."""
    timeout_s: float
    """Seconds that it may take to answer when it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Everything one engine is built from; plain values, so that it travels to the actor."""

    index: int
    model_path: str
    config: GenerationConfig
    precision: str
    max_total_sequence_length: int
    routed: RoutedForm | None = None
    """What the experts look like that responses come with; None: they come without."""
    in_flight: AsyncGRPOConfig | None = None
    """What happens to the cache when weights change under responses; None: they never do."""
    server: ServerAddress | None = None
    """The server that is the engine; None: the engine is started."""

    @property
    def sleeps(self) -> bool:
        """Whether vLLM gives up device memory while models train on the same devices; its CPU build cannot."""
        return self.config.colocated and current_platform().name == "cuda"

    @property
    def keeps_cache(self) -> bool:
        """Whether responses go on from the cache of the old weights when new ones come."""
        return self.in_flight is not None and not self.in_flight.recompute_kv_cache_after_weight_updates


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """vLLM's arguments for this engine."""
    config = settings.config
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": config.engine.dtype or settings.precision,
        "tensor_parallel_size": config.parallel.tensor,
        "pipeline_parallel_size": config.parallel.pipeline,
        "enable_expert_parallel": config.parallel.expert > 1,
        "max_model_len": settings.max_total_sequence_length,
        "max_num_seqs": config.sequences_per_engine,
        "enforce_eager": config.engine.enforce_eager,
        "enable_prefix_caching": config.engine.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER_BACKEND},
        "worker_extension_cls": "megatron_grpo.refit.worker.RefitWorker",
    }
    if settings.routed is not None:
        arguments |= recording_arguments()
    if config.engine.speculative.num_speculative_tokens:
        arguments["speculative_config"] = {"method": "ngram", **asdict(config.engine.speculative)}
    on_device = _cpu_arguments(settings) if current_platform().name == "cpu" else _cuda_arguments(settings)
    given = {
        "enable_chunked_prefill": config.engine.enable_chunked_prefill,
        "max_num_batched_tokens": config.engine.max_num_batched_tokens,
    }
    arguments |= on_device | {name: value for name, value in given.items() if value is not None}
    return arguments | {name: _made(name, value) for name, value in config.engine_args.items()}


def _made(name: str, value: Any) -> Any:
    """The value of an argument that users pass on: mappings become vLLM's settings, names members of enumerations."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    declared = next(one.type for one in fields(AsyncEngineArgs) if one.name == name)
    for kind in (declared, *get_args(declared)):
        if isinstance(value, dict) and isinstance(kind, type) and is_dataclass(kind):
            return kind(**value)
        if isinstance(value, str) and isinstance(kind, enum.EnumType):
            return kind[value]
    return value


def _cpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    return {
        "distributed_executor_backend": IN_CORE if settings.config.parallel.ranks_per_engine == 1 else "mp",
        # A prompt that is prefilled in two parts makes vLLM rewind the request's generator, which torch cannot on CPU.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_BATCH_TOKENS, settings.max_total_sequence_length),
        "kv_cache_memory_bytes": int(settings.config.engine.kv_cache_gib * 2**30),
        "worker_cls": "megatron_grpo.generation.vllm_cpu_worker.PipelineCPUWorker",
    }


def _cuda_arguments(settings: VllmSettings) -> dict[str, Any]:
    import ray

    # An engine within a node owns its GPUs through this actor, or shares those that the actor is shown; a larger one
    # has a placement group of its own.
    fits = len(ray.get_gpu_ids()) >= settings.config.parallel.ranks_per_engine
    return {
        "distributed_executor_backend": "mp" if fits or settings.config.colocated else "ray",
        "gpu_memory_utilization": settings.config.engine.gpu_memory_utilization,
        "enable_sleep_mode": settings.config.colocated,
    }
