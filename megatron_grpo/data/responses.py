"""What is asked of generation and what comes back: how to draw, one request, one response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.data.trajectory import Span, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are drawn. Log-probabilities are reported after temperature (and filters), as they were drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


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
    token went through; None: nobody asked."""
