"""Requests and responses between our types and vLLM's, calls of vLLM's processes, and an engine's statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.data.responses import EngineCounts, GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.data.routed import RoutedForm
from megatron_grpo.data.trajectory import Span
from megatron_grpo.platform.device import current_platform

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats


Result = TypeVar("Result")

PACE_S = 0.02
"""Responses that come within this time of each other leave together: few large messages instead of many small ones."""

SAME_NAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of SamplingSettings that vLLM calls the same."""

DEATH_CHECK_S = 1.0
"""Seconds between two looks at whether vLLM's processes are still there, while they are waited for."""


async def in_bunches(waiting: dict[asyncio.Task[Result], int]) -> AsyncIterator[dict[int, asyncio.Task[Result]]]:
    """Tasks of a call's requests, as they are done; each is removed from `waiting`, which has them by request number.

    Yields:
        Those done within PACE_S of the first, by number of their request.
    """
    while waiting:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        done, _ = await asyncio.wait(waiting, timeout=PACE_S)
        yield dict(sorted((waiting.pop(task), task) for task in done))


async def while_alive(llm: AsyncLLM, call: Coroutine[Any, Any, Result]) -> Result:
    """The result of a call of vLLM's processes, which vLLM itself awaits forever when they end under it.

    Raises:
        EngineLostError: one has ended.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    task = asyncio.create_task(call)
    with deaths_explained():
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
    arguments = {
        **{name: getattr(settings, name) for name in SAME_NAME},
        "top_k": settings.top_k or 0,
        "bad_words": list(settings.bad_words),
        "seed": request.seed,
        "max_tokens": max_tokens,
        "stop": list(settings.stop_strings),
        "stop_token_ids": list(settings.stop_token_ids),
        "logprobs": 0,
        "detokenize": bool(settings.stop_strings),
    }
    structured = settings.structured
    choice = None if structured.choice is None else list(structured.choice)
    given = {"regex": structured.regex, "json": structured.json_schema, "choice": choice}
    form = {name: value for name, value in given.items() if value is not None}
    return {**arguments, "structured_outputs": form} if form else arguments


async def chosen_experts(llm: AsyncLLM, finals: Sequence[RequestOutput], form: RoutedForm) -> list[NDArray[Any]]:
    """For each finished request, [prompt and response tokens but the last, numbers of a token]: its experts in a form.

    `finals` are the last outputs of the requests.
    """
    if current_platform().name == "cpu":
        from megatron_grpo.cpu.engine import recorded_experts

        return [form.from_engine(one) for one in await recorded_experts(llm, finals, form)]
    # A request that was aborted before its first token has none.
    found = [final.outputs[0].routed_experts for final in finals]
    return [form.laid_end_to_end([]) if one is None else form.from_engine(one) for one in found]


async def responses(
    llm: AsyncLLM, finals: Mapping[int, RequestOutput], form: RoutedForm | None
) -> list[tuple[int, GenerationOutput | str]]:
    """The responses of finished requests, their texts without special tokens.

    Args:
        llm: the engine.
        finals: the last output of each request, by the request's number in its call.
        form: form of the experts that each response comes with; None: responses come without.

    Returns:
        Each request's number, with its response or the reason why there is none.
    """
    outputs = list(finals.values())
    token_ids = [final.outputs[0].token_ids for final in outputs]
    texts = llm.get_tokenizer().batch_decode(token_ids, skip_special_tokens=True)
    routed: Sequence[NDArray[Any] | None] = [None] * len(outputs)
    if form is not None:
        routed = await while_alive(llm, chosen_experts(llm, outputs, form))
    return list(zip(finals, map(_response, outputs, texts, routed), strict=True))


def _response(final: RequestOutput, text: str, routed: NDArray[Any] | None) -> GenerationOutput | str:
    """A response with its experts `routed`, [tokens, numbers of a token], or why there is none."""
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
        return taken

    def _count_time(self) -> None:
        if self._busy_since is not None:
            now = time.monotonic()
            self._counts.busy_s += now - self._busy_since
            self._busy_since = now
