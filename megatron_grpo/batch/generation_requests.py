"""Requests to the engines and their responses: sampling settings, one request, one response, counts of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.special_tokens import StopConditions
from megatron_grpo.batch.trajectory import Span, StopReason
from megatron_grpo.config.generation_schema import GenerationConfig, StructuredConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Settings of sampling. Reported log-probabilities are taken after penalties, temperature and filters."""

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
    """Form of the responses; any form if none of its fields is set."""
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


def make_sampling_settings(generation: GenerationConfig, stops: StopConditions) -> SamplingSettings:
    """The sampling settings of a configuration; `stops`: what ends a response, from `stop_conditions`."""
    settings = {one.name: getattr(generation, one.name) for one in fields(SamplingSettings)}
    ends = {"stop_token_ids": stops.token_ids, "stop_strings": stops.strings}
    return SamplingSettings(**{**settings, "bad_words": tuple(generation.bad_words), **ends})


@dataclass(slots=True, kw_only=True)  # not frozen: that pickles ten times slower
class GenerationRequest:
    """One response to sample."""

    prompt_ids: NDArray[np.int32]
    """[prompt tokens], int32: all tokens before the response."""
    seed: int
    """Seed of this request alone, so that its tokens do not depend on other requests in flight."""
    max_new_tokens: int
    """Most tokens of this response; the settings' max_new_tokens limits it too."""


@dataclass(slots=True, kw_only=True)
class GenerationOutput:
    """One sampled response."""

    token_ids: NDArray[np.int32]
    """[response tokens], int32: sampled tokens, the stop token included when one was sampled."""
    logprobs: NDArray[np.float32]
    """[response tokens], float32: log-probabilities under the distribution that each token was drawn from."""
    text: str
    """The text of `special_tokens.response_text`."""
    stop_reason: StopReason
    spans: list[Span]
    """Spans of tokens, each sampled by one committed weight version; positions count from the first response token."""
    routed: NDArray[Any] | None = None
    """[prompt and response tokens but the last, `RoutedForm.columns`]: the experts that each token went through; None:
    not recorded."""


@dataclass(slots=True, kw_only=True)
class EngineCounts:
    """Counts of one engine since the previous step."""

    running: int = 0
    """Most responses that were decoded together."""
    waiting: int = 0
    """Most requests that waited for others to end."""
    kv_cache_usage: float = 0.0
    """Largest share of the KV cache that was taken."""
    prefix_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens that were found in the prefix cache."""
    drafted: int = 0
    """Tokens that speculative decoding proposed."""
    accepted: int = 0
    """Proposed tokens that the model accepted."""
    tokens: int = 0
    """Tokens of the responses that were completed."""
    busy_s: float = 0.0
    """Seconds in which some request was in flight."""


def compute_engine_metrics(counts: Sequence[EngineCounts]) -> dict[str, float]:
    """Metrics of the engines over a step.

    Args:
        counts: counts of every engine since the previous step.

    Returns:
        engine_running, engine_waiting and engine_kv_cache_usage: the largest of the engines; engine_tokens_per_s: mean
        over engines that completed something; engine_prefix_hit_rate and, with speculative decoding,
        engine_draft_acceptance_rate: over the tokens of all. A rate without lookups or proposals is left out.
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
