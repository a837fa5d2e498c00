"""Conversion of requests and responses to and from vLLM's types, calls of vLLM's processes, engine statistics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.special_tokens import response_text
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.models.routed_experts import RoutedForm

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats


Result = TypeVar("Result")

PACE_S = 0.02
"""Seconds that a complete response waits for others to be sent with it, which saves messages."""

SAME_NAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of SamplingSettings that have the same name in vLLM."""

DEATH_CHECK_S = 1.0
"""Seconds between two checks that vLLM's processes still live, during a call of them."""


async def in_bunches(waiting: dict[asyncio.Task[Result], int]) -> AsyncIterator[dict[int, asyncio.Task[Result]]]:
    """Yield tasks of a call's requests as they finish, and remove them from `waiting` (request numbers by task).

    Yields:
        Tasks that finished within PACE_S of the first, by number of their request.
    """
    while waiting:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        done, _ = await asyncio.wait(waiting, timeout=PACE_S)
        yield dict(sorted((waiting.pop(task), task) for task in done))


async def while_alive(llm: AsyncLLM, call: Coroutine[Any, Any, Result]) -> Result:
    """Await a call of vLLM's processes, for which vLLM itself waits forever if a process ends during it.

    Raises:
        EngineLostError: a process has ended.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    task = asyncio.create_task(call)
    with deaths_explained():
        while not (await asyncio.wait({task}, timeout=DEATH_CHECK_S))[0]:
            if llm.errored:
                task.cancel()
                raise EngineDeadError
        return task.result()


def without_problems(answers: Sequence[Any], where: str = "") -> list[Any]:
    """The answers of an engine's workers to a method of refit.worker.RefitWorker, if none of them is a problem (text).

    Raises:
        RuntimeError: workers had problems; the message has all of them, each after `where`.
    """
    problems = [f"{where}{answer}" for answer in answers if isinstance(answer, str)]
    if problems:
        raise RuntimeError("; ".join(problems))
    return list(answers)


@contextmanager
def deaths_explained() -> Iterator[None]:
    """Turn all errors of calls of vLLM's processes that mean an ended process into EngineLostError."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise EngineLostError("a vLLM process of this engine has ended") from None
    except (RuntimeError, ValueError):
        raise
    except Exception as error:  # noqa: BLE001 - a call whose process ends raises a bare Exception
        raise EngineLostError(f"a vLLM process of this engine failed: {error}") from None


def sampling_params(request: GenerationRequest, settings: SamplingSettings, longest: int) -> SamplingParams:
    """Convert a request to vLLM's SamplingParams; takes and raises the same as `sampling_arguments`."""
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


def settings_in_use(config: VllmConfig) -> dict[str, Any]:
    """The settings of an engine that decide its log-probabilities, in JSON types.

    Returns:
        "model": its configuration of the text model, by transformers' names; and dtypes, quantisation, longest sequence
        and the mode of log-probabilities, by vLLM's names.
    """
    model = config.model_config
    settings = {
        "model": model.hf_text_config.to_dict(),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "max_model_len": model.max_model_len,
        "logprobs_mode": model.logprobs_mode,
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def sampling_arguments(request: GenerationRequest, settings: SamplingSettings, longest: int) -> dict[str, Any]:
    """Sampling parameters of a request by vLLM's names, in JSON types; requests share no mutable value.

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
        "skip_special_tokens": False,  # stop strings may contain special tokens
    }
    structured = settings.structured
    choice = None if structured.choice is None else list(structured.choice)
    given = {"regex": structured.regex, "json": structured.json_schema, "choice": choice}
    form = {name: value for name, value in given.items() if value is not None}
    return {**arguments, "structured_outputs": form} if form else arguments


async def chosen_experts(llm: AsyncLLM, finals: Sequence[RequestOutput], form: RoutedForm) -> list[NDArray[Any]]:
    """Recorded experts of each finished request: [prompt and response tokens but the last, experts recorded per token].

    `finals`: last outputs of the requests; `form`: form of the experts.
    """
    from megatron_grpo.platform.device import detect_platform  # imports torch, which rollout workers do without

    if detect_platform().name == "cpu":
        from megatron_grpo.generation.cpu_engine import recorded_experts

        return [form.from_engine(one) for one in await recorded_experts(llm, finals, form)]
    # A request that was aborted before its first token has no experts.
    found = [final.outputs[0].routed_experts for final in finals]
    return [form.concatenate([]) if one is None else form.from_engine(one) for one in found]


async def responses(
    llm: AsyncLLM, finals: Mapping[int, RequestOutput], form: RoutedForm | None, tokenizer: Any
) -> list[tuple[int, GenerationOutput | str]]:
    """Make the responses of finished requests.

    Args:
        llm: the engine.
        finals: the last output of each request, by the request's number in its call.
        form: form of the recorded experts; None: none are recorded.
        tokenizer: the model's tokenizer, from transformers, for the texts.

    Returns:
        Numbers of the requests, each with its response or the reason why there is none.
    """
    outputs = list(finals.values())
    routed: Sequence[NDArray[Any] | None] = [None] * len(outputs)
    if form is not None:
        routed = await while_alive(llm, chosen_experts(llm, outputs, form))
    made = [_response(final, tokenizer, experts) for final, experts in zip(outputs, routed, strict=True)]
    return list(zip(finals, made, strict=True))


def _response(final: RequestOutput, tokenizer: Any, routed: NDArray[Any] | None) -> GenerationOutput | str:
    """Make a response with its experts `routed`, [tokens, experts recorded per token]; or the reason of its failure."""
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
        text=response_text(tokenizer, completion.token_ids, completion.finish_reason),
        stop_reason=completion.finish_reason,
        spans=[Span(span.start, span.end, int(span.version)) for span in spans],
        routed=routed,
    )


class EngineStatistics:
    """A stat logger for vLLM; it has the methods but not the base class of vLLM's, which takes seconds to import."""

    def __init__(self) -> None:
        self._counts = EngineCounts()
        self._busy_since: float | None = None

    def __call__(self, _config: Any, _engine: int) -> EngineStatistics:
        """Return this object, because vLLM expects a factory of loggers."""
        return self

    def attach(self, llm: AsyncLLM) -> None:
        """Become the only logger of an engine: drops vLLM's Prometheus logger, which is unused and costs time."""
        manager = llm.logger_manager
        assert manager is not None, "an engine with loggers has a manager of them"
        manager.stat_loggers = [self]

    def record(self, scheduler_stats: SchedulerStats | None, *_: Any, **__: Any) -> None:
        """Update the counts; called by vLLM after every forward pass."""
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
        """Do nothing; called by vLLM at its start."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing; called by vLLM when the engine falls asleep or wakes."""

    def completed(self, tokens: int) -> None:
        """Count the tokens of complete responses."""
        self._counts.tokens += tokens

    def in_flight(self, requests: int) -> None:
        """Record the number of requests that are now in flight."""
        if requests and self._busy_since is None:
            self._busy_since = time.monotonic()
        elif not requests:
            self._count_time()
            self._busy_since = None

    def take(self) -> EngineCounts:
        """Return the counts since the last call, and reset them."""
        self._count_time()
        taken, self._counts = self._counts, EngineCounts()
        return taken

    def _count_time(self) -> None:
        if self._busy_since is not None:
            now = time.monotonic()
            self._counts.busy_s += now - self._busy_since
            self._busy_since = now
