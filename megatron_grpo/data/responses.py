"""What is asked of generation and what comes back: how to draw, one request, one response."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_grpo.data.trajectory import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are drawn. Log-probabilities are reported after temperature (and filters), as they were drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to sample."""

    prompt_ids: list[int]
    seed: int
    """Of this request alone, so that what is drawn does not depend on what else is in flight."""
    max_new_tokens: int
    """At most this many, and at most the settings' max_new_tokens."""


@dataclass(slots=True, kw_only=True)
class GenerationOutput:
    """One sampled response."""

    token_ids: list[int]
    """Response only, the stop token included when one was sampled."""
    logprobs: list[float]
    """Of each token, under the distribution that it was drawn from."""
    text: str
    stop_reason: StopReason
    version: int
    """Committed weight version that sampled it."""
