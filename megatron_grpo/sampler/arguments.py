"""What an engine is built from, and vLLM's arguments that follow from it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_args

from numpy.typing import NDArray

from megatron_grpo.config.checks.passthrough import library_problems
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import AsyncGRPOConfig, GenerationConfig
from megatron_grpo.data.routed import RoutedForm
from megatron_grpo.platform.device import current_platform

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


async def chosen_experts(llm: AsyncLLM, finals: Sequence[RequestOutput], form: RoutedForm) -> list[NDArray[Any]]:
    """The experts that the tokens of finished requests went through.

    Args:
        llm: the engine.
        finals: the last output of each request.
        form: what the experts look like.

    Returns:
        For each request, [prompt and response tokens but the last, numbers of a token], in that form.
    """
    if current_platform().name == "cpu":
        from megatron_grpo.cpu.engine import recorded_experts

        return [form.from_engine(one) for one in await recorded_experts(llm, finals, form)]
    # A request that was aborted before its first token has none.
    found = [final.outputs[0].routed_experts for final in finals]
    return [form.laid_end_to_end([]) if one is None else form.from_engine(one) for one in found]


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
        "worker_extension_cls": "megatron_grpo.weights.refit.worker.RefitWorker",
    }
    if config.engine.speculative.num_speculative_tokens:
        arguments["speculative_config"] = {"method": "ngram", **asdict(config.engine.speculative)}
    if current_platform().name == "cpu":
        from megatron_grpo.cpu.engine import cpu_arguments

        arguments |= cpu_arguments(settings)
    else:
        arguments |= _cuda_arguments(settings)
    given = {
        "enable_chunked_prefill": config.engine.enable_chunked_prefill,
        "max_num_batched_tokens": config.engine.max_num_batched_tokens,
    }
    arguments |= {name: value for name, value in given.items() if value is not None}
    return arguments | {name: _made(name, value) for name, value in config.engine_args.items()}


def passed_field_problems(sections: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Arguments that users pass on and the installed vLLM does not have, or has with another type.

    Args:
        sections: the arguments by section of the configuration: generation.engine_args.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    kinds = {one.name: one.type for one in fields(AsyncEngineArgs)}
    what = "argument of the installed vLLM"
    return [one for section, values in sections.items() for one in library_problems(section, values, kinds, what)]


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


def _cuda_arguments(settings: VllmSettings) -> dict[str, Any]:
    import ray

    # An engine within a node owns its GPUs through this actor, or shares those that the actor is shown; a larger one
    # has a placement group of its own.
    fits = len(ray.get_gpu_ids()) >= settings.config.parallel.ranks_per_engine
    return {
        "distributed_executor_backend": "mp" if fits or settings.config.colocated else "ray",
        "gpu_memory_utilization": settings.config.engine.gpu_memory_utilization,
        "enable_sleep_mode": settings.config.colocated,
        **({} if settings.routed is None else {"enable_return_routed_experts": True}),
    }


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """One engine as the refit sees it."""

    index: int
    ranks: int
    """Worker processes: tensor * pipeline."""
