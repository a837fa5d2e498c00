"""What the rest of the system knows of generation: requests in, sampled tokens out, one weight version at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from megatron_grpo.data.responses import GenerationOutput, GenerationRequest, SamplingSettings


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
