"""What is asked of generation and what comes back: how to draw, one request, one response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.generation_schema import GenerationConfig, StructuredConfig
from megatron_grpo.data.trajectory import Span, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are drawn. Log-probabilities are reported as they were drawn: after penalties, temperature, filter."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[str, ...] = ()
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    """The form of responses; without a field that is set they may have any."""
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


_SAME = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "structured",
)
"""Settings that are keys of the configuration as they stand."""


def sampling_settings(generation: GenerationConfig, eos_token_id: int | None) -> SamplingSettings:
    """How a configuration says that tokens are drawn.

    Args:
        generation: the section of the configuration.
        eos_token_id: token that ends a response beside generation.stop_token_ids; None: the tokenizer has none.
    """
    stops = {*generation.stop_token_ids, *(() if eos_token_id is None else (eos_token_id,))}
    return SamplingSettings(
        **{name: getattr(generation, name) for name in _SAME},
        bad_words=tuple(generation.bad_words),
        stop_token_ids=tuple(sorted(stops)),
        stop_strings=tuple(generation.stop_strings),
    )


@dataclass(slots=True, kw_only=True)  # not frozen: that pickles ten times slower
class GenerationRequest:
    """One response to sample."""

    prompt_ids: NDArray[np.int32]
    """[prompt tokens], int32: everything that the response follows."""
    seed: int
    """Seed of the one request, so that what is drawn does not depend on what else is in flight."""
    max_new_tokens: int
    """Most tokens of the response, which has no more than the settings' max_new_tokens either."""


@dataclass(slots=True, kw_only=True)
class GenerationOutput:
    """One sampled response."""

    token_ids: NDArray[np.int32]
    """[response tokens], int32: sampled tokens, the stop token included when one was sampled."""
    logprobs: NDArray[np.float32]
    """[response tokens], float32: log-probabilities under the distribution that each token was drawn from."""
    text: str
    stop_reason: StopReason
    spans: list[Span]
    """Tokens by the committed weight version that sampled them; positions count from the first response token."""
    routed: NDArray[Any] | None = None
    """[prompt and response tokens but the last, numbers of a token], in the form of `RoutedForm`: the experts that each
    token went through; None: not recorded."""


@dataclass(slots=True, kw_only=True)
class EngineCounts:
    """Of one engine."""

    running: int = 0
    """Most responses that were decoded together."""
    waiting: int = 0
    """Most requests that waited for others to end."""
    kv_cache_usage: float = 0.0
    """Largest share of the KV cache that was taken."""
    prefix_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Those of them that were there."""
    drafted: int = 0
    """Tokens that speculative decoding proposed."""
    accepted: int = 0
    """Those of them that were kept."""
    tokens: int = 0
    """Tokens of the responses that were completed."""
    busy_s: float = 0.0
    """Seconds in which some request was in flight."""


def engine_figures(counts: Sequence[EngineCounts]) -> dict[str, float]:
    """The figures of a step.

    Args:
        counts: of every engine, since the step before.

    Returns:
        engine_running, engine_waiting and engine_kv_cache_usage: the largest of the engines; engine_tokens_per_s: mean
        over engines that completed something; engine_prefix_hit_rate and, with speculative decoding,
        engine_draft_acceptance_rate: over the tokens of all. Without a lookup or a proposal there is no rate.
    """
    looked_up, drafted = sum(one.prefix_tokens for one in counts), sum(one.drafted for one in counts)
    speeds = [one.tokens / one.busy_s for one in counts if one.busy_s > 0]
    return {
        "engine_running": float(max(one.running for one in counts)),
        "engine_waiting": float(max(one.waiting for one in counts)),
        "engine_kv_cache_usage": max(one.kv_cache_usage for one in counts),
        **({"engine_tokens_per_s": fmean(speeds)} if speeds else {}),
        **({"engine_prefix_hit_rate": sum(one.prefix_hits for one in counts) / looked_up} if looked_up else {}),
        **({"engine_draft_acceptance_rate": sum(one.accepted for one in counts) / drafted} if drafted else {}),
    }
