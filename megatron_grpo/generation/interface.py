"""What the rest of the system knows of generation: requests in, sampled tokens out, one weight version at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from megatron_grpo.rollouts.trajectory import StopReason


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


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """One engine as the refit sees it."""

    index: int
    ranks: int
    """Worker processes: tensor * pipeline."""


class GenerationInterface(ABC):
    """A pool of inference engines that look like one."""

    @abstractmethod
    def generate(self, requests: list[GenerationRequest], settings: SamplingSettings) -> list[GenerationOutput]:
        """Sample all requests; outputs in the order of the requests.

        Raises:
            RuntimeError: an engine died or the deadline passed; the message names the engine.
        """

    @abstractmethod
    def endpoints(self) -> list[EngineEndpoint]:
        """The engines, in the order of their index."""

    @abstractmethod
    def shutdown(self) -> None:
        """End every engine process; idempotent."""
