"""What is asked of generation and what comes back: how to draw, one request, one response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.generation_schema import GenerationConfig, StructuredConfig
from megatron_grpo.data.trajectory import Span, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The form of a response; one of the fields is set."""

    regex: str | None = None
    json_schema: str | None = None
    """JSON text."""
    choice: tuple[str, ...] | None = None


def structure_of(config: StructuredConfig) -> Structure | None:
    """The form that a configuration asks for; None: it asks for none."""
    if config == StructuredConfig():
        return None
    choice = None if config.choice is None else tuple(config.choice)
    return Structure(regex=config.regex, json_schema=config.json_schema, choice=choice)


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
    structure: Structure | None = None
    """None: responses may have any form."""
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


def sampling_settings(generation: GenerationConfig, eos_token_id: int | None) -> SamplingSettings:
    """How a configuration says that tokens are drawn.

    Args:
        generation: the section of the configuration.
        eos_token_id: token that ends a response beside generation.stop_token_ids; None: the tokenizer has none.
    """
    stops = set(generation.stop_token_ids)
    if eos_token_id is not None:
        stops.add(eos_token_id)
    return SamplingSettings(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        repetition_penalty=generation.repetition_penalty,
        presence_penalty=generation.presence_penalty,
        frequency_penalty=generation.frequency_penalty,
        bad_words=tuple(generation.bad_words),
        structure=structure_of(generation.structured),
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
    token went through; None: nobody asked."""
