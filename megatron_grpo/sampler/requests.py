"""A request and its response as vLLM has them, from and into what the rest of the system knows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.config.generation_schema import GenerationConfig
from megatron_grpo.data.responses import (
    EngineCounts,
    GenerationOutput,
    GenerationRequest,
    SamplingSettings,
)
from megatron_grpo.data.routed import RoutedForm
from megatron_grpo.data.trajectory import Span
from megatron_grpo.sampler.arguments import chosen_experts

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector
    from vllm.v1.metrics.stats import SchedulerStats


PACE_S = 0.02
"""Responses that come within this time of each other leave together: few large messages instead of many small ones."""


class Arrivals:
    """Stands in for the events of many of vLLM's queues, each of which gets one output: counts those that have."""

    def __init__(self, expected: int) -> None:
        self._left = expected
        self._some, self._all = asyncio.Event(), asyncio.Event()

    def set(self) -> None:
        """A queue has got its output."""
        self._left -= 1
        self._some.set()
        if not self._left:
            self._all.set()

    def clear(self) -> None:
        """A queue was emptied."""

    async def some(self) -> None:
        """Return when something has arrived: then after PACE_S, or as soon as it is everything."""
        await self._some.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(PACE_S):
                await self._all.wait()
        self._some.clear()


def drain(waiting: dict[int, RequestOutputCollector]) -> dict[int, RequestOutput]:
    """Take what has arrived out of the queues, and out of those that are waited for."""
    finals = {index: output for index, queue in waiting.items() if (output := queue.get_nowait()) is not None}
    for index in finals:
        del waiting[index]
    return finals


Result = TypeVar("Result")

DEATH_CHECK_S = 1.0
"""Seconds between two looks at whether vLLM's processes are still there, while they are waited for."""


async def while_alive(llm: AsyncLLM, call: Coroutine[Any, Any, Result]) -> Result:
    """The result of a call of vLLM's processes, which vLLM itself awaits forever when they end under it."""
    from vllm.v1.engine.exceptions import EngineDeadError

    task = asyncio.create_task(call)
    while not (await asyncio.wait({task}, timeout=DEATH_CHECK_S))[0]:
        if llm.errored:
            task.cancel()
            raise EngineDeadError
    return task.result()


@contextmanager
def deaths_explained() -> Iterator[None]:
    """Let calls of vLLM's processes raise EngineLostError when one has ended, in whatever way that shows."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise EngineLostError("a vLLM process of this engine has ended") from None
    except (RuntimeError, ValueError):
        raise
    except Exception as error:  # noqa: BLE001 - a call that a process ends under raises just that
        raise EngineLostError(f"a vLLM process of this engine failed: {error}") from None


def sampling_params(request: GenerationRequest, settings: SamplingSettings, longest: int) -> SamplingParams:
    """A request as vLLM takes it; arguments and errors of `sampling_arguments`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    arguments = sampling_arguments(request, settings, longest)
    form = arguments.pop("structured_outputs", None)
    return SamplingParams(
        **arguments,
        structured_outputs=None if form is None else StructuredOutputsParams(**form),
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def sampling_arguments(request: GenerationRequest, settings: SamplingSettings, longest: int) -> dict[str, Any]:
    """How a request is sampled, by vLLM's names, in types that JSON has; no two requests share a value.

    Args:
        request: the response to sample.
        settings: temperature, filters and stop conditions.
        longest: most tokens of prompt and response together.

    Raises:
        ValueError: the prompt leaves no room for a response.
    """
    room = longest - len(request.prompt_ids)
    max_tokens = min(request.max_new_tokens, settings.max_new_tokens, room)
    if max_tokens < 1:
        raise ValueError(
            f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a response within "
            f"policy.max_total_sequence_length={longest}"
        )
    structured = settings.structured
    choice = None if structured.choice is None else list(structured.choice)
    given = {"regex": structured.regex, "json": structured.json_schema, "choice": choice}
    form = {name: value for name, value in given.items() if value is not None}
    return {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or 0,
        "min_p": settings.min_p,
        "repetition_penalty": settings.repetition_penalty,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "bad_words": list(settings.bad_words),
        **({"structured_outputs": form} if form else {}),
        "seed": request.seed,
        "max_tokens": max_tokens,
        "stop": list(settings.stop_strings),
        "stop_token_ids": list(settings.stop_token_ids),
        "logprobs": 0,
        "detokenize": bool(settings.stop_strings),
    }


def warm_up_call(config: GenerationConfig) -> tuple[list[GenerationRequest], SamplingSettings]:
    """What an engine samples first, which allocates and compiles: a full batch, so that the first real one does not.

    With the structure of the real ones, so that vLLM says at the start what it cannot make of it.
    """
    settings = SamplingSettings(max_new_tokens=2, structured=config.structured)
    request = GenerationRequest(prompt_ids=np.zeros(2, dtype=np.int32), seed=0, max_new_tokens=2)
    return [request] * config.sequences_per_engine, settings


async def responses(
    llm: AsyncLLM, finals: Mapping[int, RequestOutput], form: RoutedForm | None
) -> list[tuple[int, GenerationOutput | str]]:
    """The responses of finished requests, their texts without special tokens.

    Args:
        llm: the engine.
        finals: the last output of each request, by the request's number in its call.
        form: what the experts look like that each comes with; None: nobody asked.

    Returns:
        Each request's number, with its response or the reason why there is none.
    """
    outputs = list(finals.values())
    token_ids = [final.outputs[0].token_ids for final in outputs]
    texts = llm.get_tokenizer().batch_decode(token_ids, skip_special_tokens=True)
    routed: Sequence[NDArray[Any] | None] = [None] * len(outputs)
    if form is not None:
        routed = await while_alive(llm, chosen_experts(llm, outputs, form))
    answers = map(_response, outputs, texts, routed)
    return list(zip(finals, answers, strict=True))


def _response(final: RequestOutput, text: str, routed: NDArray[Any] | None) -> GenerationOutput | str:
    """A response, or why there is none; `routed`: [tokens, numbers of a token], the experts that it comes with."""
    completion = final.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        return f"vLLM ended a request early: {completion.finish_reason}"
    logprobs = completion.logprobs.logprobs
    spans = completion.weight_versions or []
    assert len(logprobs) == len(completion.token_ids), "one log-probability per sampled token"
    assert spans, "every token has a version"
    return GenerationOutput(
        token_ids=np.array(completion.token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=text,
        stop_reason=completion.finish_reason,
        spans=[Span(span.start, span.end, int(span.version)) for span in spans],
        routed=routed,
    )


class EngineStatistics:
    """A stat logger of vLLM, by its methods: it cannot inherit from vLLM's, which takes seconds to import."""

    def __init__(self) -> None:
        self._counts = EngineCounts()
        self._busy_since: float | None = None

    def __call__(self, _config: Any, _engine: int) -> EngineStatistics:
        """Itself: vLLM takes loggers as functions that make them."""
        return self

    def attach(self, llm: AsyncLLM) -> None:
        """Be the only logger of an engine: vLLM adds one for Prometheus, which nobody asks and which takes its time."""
        manager = llm.logger_manager
        assert manager is not None, "an engine with loggers has a manager of them"
        manager.stat_loggers = [self]

    def record(self, scheduler_stats: SchedulerStats | None, *_: Any, **__: Any) -> None:
        """Called by vLLM after every pass."""
        stats, counts = scheduler_stats, self._counts
        if stats is None:
            return
        counts.running = max(counts.running, stats.num_running_reqs)
        counts.waiting = max(counts.waiting, stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)
        counts.kv_cache_usage = max(counts.kv_cache_usage, stats.kv_cache_usage)
        counts.prefix_tokens += stats.prefix_cache_stats.queries
        counts.prefix_hits += stats.prefix_cache_stats.hits
        if stats.spec_decoding_stats is not None:
            counts.drafted += stats.spec_decoding_stats.num_draft_tokens
            counts.accepted += stats.spec_decoding_stats.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Called by vLLM at its start."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Called by vLLM when the engine falls asleep or wakes."""

    def completed(self, tokens: int) -> None:
        """So many tokens of responses are complete."""
        self._counts.tokens += tokens

    def in_flight(self, requests: int) -> None:
        """So many requests are in flight now."""
        if requests and self._busy_since is None:
            self._busy_since = time.monotonic()
        elif not requests:
            self._count_time()
            self._busy_since = None

    def take(self) -> EngineCounts:
        """What was counted since the last call."""
        self._count_time()
        taken, self._counts = self._counts, EngineCounts()
        return replace(taken)

    def _count_time(self) -> None:
        if self._busy_since is not None:
            now = time.monotonic()
            self._counts.busy_s += now - self._busy_since
            self._busy_since = now
