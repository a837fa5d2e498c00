"""Requests to the engines, their responses, and counts of an engine's work."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.batch.special_tokens import StopConditions
from megatron_grpo.batch.trajectory import Span, StopReason
from megatron_grpo.config.generation_schema import GenerationConfig, StructuredConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are drawn.

    Example:
        SamplingSettings(max_new_tokens=512, temperature=0.8, top_p=0.95, stop_token_ids=(2,))
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[str, ...] = ()
    structured: StructuredConfig = field(default_factory=StructuredConfig)  # grammar; none if no field is set
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


def make_sampling_settings(generation: GenerationConfig, stops: StopConditions) -> SamplingSettings:
    # The fields have the names of configuration keys; a tokenizer may have added to the configured stops.
    settings = {field.name: getattr(generation, field.name) for field in fields(SamplingSettings)}
    settings |= {"bad_words": tuple(generation.bad_words)}
    return SamplingSettings(**settings | {"stop_token_ids": stops.token_ids, "stop_strings": stops.strings})


@dataclass(slots=True, kw_only=True)  # not frozen: that pickles ten times slower
class GenerationRequest:
    """One response to sample.

    Example:
        GenerationRequest(prompt_ids=np.array([5, 6, 7], dtype=np.int32), seed=1234, max_new_tokens=512)
    """

    prompt_ids: NDArray[np.int32]  # all tokens before the response: [prompt tokens], int32
    seed: int  # seed of this request alone, so that its tokens do not depend on other requests in flight
    max_new_tokens: int  # most tokens of this response; the settings' max_new_tokens limits it too
    images: list[StoredImage] = field(default_factory=list)  # of the prompt, in the order of their placeholders


@dataclass(slots=True, kw_only=True)
class GenerationOutput:
    """One sampled response.

    Example: one token, and the token that ends the response, after a refit between them
        GenerationOutput(
            token_ids=np.array([40, 2], dtype=np.int32), logprobs=np.array([-0.7, -0.1], dtype=np.float32),
            text="42", stop_reason="stop", spans=[Span(0, 1, version=3), Span(1, 2, version=4)],
        )
    """

    token_ids: NDArray[np.int32]  # sampled tokens, with the stop token if one was sampled: [response tokens], int32
    logprobs: NDArray[np.float32]  # log-probabilities after penalties, temperature, filters: [response tokens], float32
    text: str  # the text of `decode_response`
    stop_reason: StopReason
    spans: list[Span]  # tokens of one committed weight version each; positions count from the first response token
    routed: NDArray[np.uint8] | None = None
    """Experts that each token went through: [prompt and response tokens but the last, `RoutedForm.token_bytes`]. None:
    not recorded."""


@dataclass(slots=True, kw_only=True)
class EngineCounts:
    """Counts of one engine since the previous step."""

    running: int = 0  # most responses that were decoded together
    waiting: int = 0  # most requests that waited to be decoded
    kv_cache_usage: float = 0.0  # largest share of the KV cache in use
    prefix_tokens: int = 0  # prompt tokens that were looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens that were found in the prefix cache
    drafted: int = 0  # tokens that speculative decoding proposed
    accepted: int = 0  # proposed tokens that the model accepted
    tokens: int = 0  # tokens of complete responses
    busy_s: float = 0.0  # seconds in which some request was in flight

    def __add__(self, later: EngineCounts) -> EngineCounts:
        """Join the counts of two periods of one engine."""
        names = ("running", "waiting", "kv_cache_usage")
        largest = {name: max(getattr(self, name), getattr(later, name)) for name in names}
        sums = {name: count + getattr(later, name) for name, count in asdict(self).items()}
        return EngineCounts(**{**sums, **largest})


def compute_engine_metrics(counts: Collection[EngineCounts]) -> dict[str, float]:
    """Compute the metrics of all engines over a step.

    engine_tokens_per_s is a mean over engines that completed something; rates are over the tokens of all engines, and
    left out without lookups or proposals; the others are the largest of the engines.
    """
    speeds = [engine.tokens / engine.busy_s for engine in counts if engine.busy_s > 0]
    metrics = {
        "engine_running": float(max(engine.running for engine in counts)),
        "engine_waiting": float(max(engine.waiting for engine in counts)),
        "engine_kv_cache_usage": max(engine.kv_cache_usage for engine in counts),
    }
    if speeds:
        metrics["engine_tokens_per_s"] = fmean(speeds)
    if looked_up := sum(engine.prefix_tokens for engine in counts):
        metrics["engine_prefix_hit_rate"] = sum(engine.prefix_hits for engine in counts) / looked_up
    if drafted := sum(engine.drafted for engine in counts):
        metrics["engine_draft_acceptance_rate"] = sum(engine.accepted for engine in counts) / drafted
    return metrics
