"""Prompts that were begun together, as the driver hears of them: all at once, or each when it is complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A generation batch that `RolloutPool.begin` has begun, for `RolloutPool.finish`."""

    generated: list[Any]
    """By worker, a reference that is there when its responses are."""
    collected: list[Any]
    """By worker, a reference to its groups."""

    def is_done(self) -> bool:
        """Whether everything is sampled and scored, or has failed."""
        return len(ray.wait(self.collected, num_returns=len(self.collected), timeout=0)[0]) == len(self.collected)


class Complete(NamedTuple):
    """A prompt whose group is complete, and waits to be taken."""

    number: int
    """By which the driver knows the prompt."""
    worker: int
    """Number of the rollout worker that has the group."""


class GroupStream:
    """What rollout workers yield of some prompts (`RolloutWorker.collect_each`)."""

    def __init__(self, calls: dict[int, Any]) -> None:
        """
        Args:
            calls: by number of the worker, a generator (Ray's) of references to numbers of prompts.
        """
        self.calls = calls
        """Those that are not over."""

    def arrived(self, get: Callable[[int, Any], list[int]]) -> list[Complete]:
        """What has become complete since the last call, without waiting.

        Args:
            get: (number of the worker, reference) -> what it refers to.
        """
        found = []
        for worker, call in list(self.calls.items()):
            while ray.wait([call], timeout=0)[0]:
                try:
                    reference = next(call)
                except StopIteration:
                    del self.calls[worker]
                    break
                found += [Complete(number, worker) for number in get(worker, reference)]
        return found
