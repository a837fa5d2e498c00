"""What the rest of the system knows of generation: actors that sample, and how many ranks each has to be refitted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """One engine as the refit sees it."""

    index: int
    ranks: int
    """Worker processes: tensor * pipeline."""


class GenerationInterface(ABC):
    """A pool of inference engines that look like one."""

    @property
    @abstractmethod
    def engines(self) -> Sequence[Any]:
        """Ray actors, in the order of their index, with two methods that rollout workers call and one of their pool.

        `generate(requests, settings, call)` is a streaming generator of lists of (index of the request, its response or
        the reason why there is none); `abort(call, indices)` ends some requests of a call early;
        `take_counts()` returns what the engine had to do since the last call, as `EngineCounts`.
        """

    @abstractmethod
    def endpoints(self) -> list[EngineEndpoint]:
        """The engines, in the order of their index."""

    @abstractmethod
    def shutdown(self) -> None:
        """End every engine process; idempotent."""
