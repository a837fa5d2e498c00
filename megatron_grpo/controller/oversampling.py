"""Asynchronous sampling of more prompts than a step takes: the step learns from the prompts that are complete first.

Long responses are not aborted. They continue under the weights that are published meanwhile, and a later step takes
them.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron_grpo.config.loop_schema import LoopConfig
from megatron_grpo.data.loader import Batches, with_waiting
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.trajectory import SampledGroup, renumbered
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.sampler.pool import Complete, GroupStream, RolloutPool

Group = TypeVar("Group")


@dataclass(slots=True)
class _Begun(Generic[Group]):
    """A prompt that is being sampled, or has been."""

    row: int
    version: int
    """Version of the engines' weights when it was begun."""
    group: Group | None = None
    """The sampled group; None: not yet complete."""
    left_over: bool = False
    """Whether a step has taken a later prompt before it."""


@dataclass(frozen=True, slots=True)
class Taken(Generic[Group]):
    """The prompts that a step takes."""

    groups: list[Group]
    """In the order of their prompts in the data."""
    resumed: int
    """Groups that were under way while an earlier step took later prompts."""
    left_over: int
    """Prompts that were begun before the last one taken, and are still under way."""


class FirstComplete(Generic[Group]):
    """Prompts under way, of which a step takes `prompts_per_take` complete ones, the oldest first.

    A prompt that was begun with weights of version w must be taken by the step that learns with version
    w + max_age_steps at the latest. A step takes a fixed number of prompts, so deadlines can pile up: if a step took
    only young prompts, later steps could be left with more old ones than they can take. A step therefore waits until,
    for every k, the prompts that are due within k steps are no more than k steps take (`_in_time`).
    """

    def __init__(self, prompts_per_take: int, max_age_steps: int) -> None:
        """
        Args:
            prompts_per_take: prompts that are taken together; every step takes at least once.
            max_age_steps: most steps from the weights with which a prompt is begun to those that learn from it.
        """
        self._per_take, self._max_age = prompts_per_take, max_age_steps
        self._begun: dict[int, _Begun[Group]] = {}
        """By number, in the order of the data."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def rows(self) -> list[int]:
        """Rows of the prompts that no step has taken, in the order of the data."""
        return [one.row for one in self._begun.values()]

    @property
    def complete(self) -> int:
        """Prompts that are complete and that no step has taken."""
        return sum(one.group is not None for one in self._begun.values())

    def add(self, row: int, version: int) -> int:
        """Record a prompt that is begun with weights of this version; returns its number."""
        assert len(self._begun) < self._per_take * (self._max_age + 1), "what is sampled further ahead becomes too old"
        self._begun[self._next] = _Begun(row, version)
        self._next += 1
        return self._next - 1

    def put(self, number: int, group: Group) -> None:
        """Record the sampled group of a prompt."""
        self._begun[number].group = group

    def take(self, version: int) -> Taken[Group] | None:
        """The prompts of the step that learns with weights of this version; None: too few are complete yet."""
        complete = [number for number, one in self._begun.items() if one.group is not None]
        if len(complete) < self._per_take or not self._in_time(version):
            return None
        numbers = complete[: self._per_take]
        taken = [self._begun.pop(number) for number in numbers]
        left_over = [one for number, one in self._begun.items() if number < numbers[-1]]
        for one in left_over:
            one.left_over = True
        assert all(0 <= version - one.version <= self._max_age for one in taken), (version, taken)
        groups = [one.group for one in taken if one.group is not None]
        return Taken(groups, sum(one.left_over for one in taken), len(left_over))

    def _in_time(self, version: int) -> bool:
        """Whether later steps can still take every other prompt in time once the oldest complete ones are taken."""
        for last in range(version, version + self._max_age):
            due = [one for one in self._begun.values() if one.version + self._max_age <= last]
            later = self._per_take * (last - version)
            if len(due) - later > sum(one.group is not None for one in due):
                return False
        return True


class Oversampling:
    """Prompts that are begun in the order of the data, and taken as they are complete (`FirstComplete`)."""

    def __init__(
        self, rollouts: RolloutPool, loader: Batches, loop: LoopConfig, settings: SamplingSettings, begun: int
    ) -> None:
        """
        Args:
            rollouts: samples the prompts.
            loader: loader of the prompts that `take` is given, for its position and the size of its batches.
            loop: samples per prompt, seed, last step, prompts under way, and the greatest age of a trajectory in steps.
            settings: how tokens are drawn.
            begun: generation batches that steps have taken before.
        """
        asynchronous = loop.async_grpo
        assert asynchronous.oversampling_factor is not None, "without it samples come in the order of the data"
        self._rollouts, self._loader, self._loop, self._settings = rollouts, loader, loop, settings
        self._number = begun
        self._per_take = loader.prompts_per_batch
        self._under_way = int(asynchronous.oversampling_factor * self._per_take)
        self._buffer: FirstComplete[Complete] = FirstComplete(self._per_take, asynchronous.max_trajectory_age_steps)
        self._next: deque[DatumSpec] = deque()
        """Prompts of the last generation batch that are not yet begun."""
        self._streams: list[GroupStream] = []
        self._taken: Taken[Complete] = Taken([], 0, 0)
        self.position = copy.deepcopy(loader.state_dict())
        """State of the loader that yields every prompt which no step has taken, for checkpoints. Steps take prompts out
        of order, so the loader's own state is not enough: the rows of the prompts under way are saved with it, and a
        resumed run samples them again before any other."""

    def take(self, batches: Iterator[list[DatumSpec]], version: int, timer: StepTimer) -> list[SampledGroup] | None:
        """The prompts that are complete first, as many as a generation batch has; None: none are left.

        Args:
            batches: prompts of generation batches, in the order of the data; the same iterator each time.
            version: of the weights that the step begins with, which generation has.
            timer: counts what is waited for as "generation".

        Raises:
            SamplingError: an engine or an environment failed, or too many rollouts did.
        """
        self._begin(batches, version)
        if not len(self._buffer):
            return None
        with timer.phase("generation"):
            self._taken = self._first_complete(version)
            groups = self._rollouts.take(self._taken.groups)
        waiting = [*self._buffer.rows, *(datum["idx"] for datum in self._next)]
        self.position = with_waiting(self._loader.state_dict(), waiting)
        return renumbered(groups)

    def metrics(self) -> dict[str, float]:
        """Prompts in the buffer when the step got its own, and how many it took out of order."""
        return {
            "buffer_depth": float(self._buffer.complete),
            "buffer_in_flight": float(len(self._buffer) - self._buffer.complete),
            "oversampling_left_over": float(self._taken.left_over),
            "oversampling_resumed": float(self._taken.resumed),
        }

    def _begin(self, batches: Iterator[list[DatumSpec]], version: int) -> None:
        """Begin as many prompts as are missing, with the seeds of the generation batches that they are in."""
        needed = self._per_take * (self._loop.max_num_steps - version)
        missing = min(self._under_way, needed) - len(self._buffer)
        while missing > 0:
            if not self._next:
                self._next.extend(next(batches, []))
                self._number += 1
            if not self._next:
                return
            data = [self._next.popleft() for _ in range(min(missing, len(self._next)))]
            missing -= len(data)
            stream = self._rollouts.begin_each(
                {self._buffer.add(datum["idx"], version): datum for datum in data},
                samples_per_prompt=self._loop.num_generations_per_prompt,
                settings=self._settings,
                run_seed=self._loop.seed,
                step=self._number,
            )
            self._streams.append(stream)

    def _first_complete(self, version: int) -> Taken[Complete]:
        since = time.monotonic()
        while True:
            self._look()
            taken = self._buffer.take(version)
            if taken is not None:
                return taken
            self._rollouts.wait_for_groups(self._streams, since)

    def _look(self) -> None:
        """Record prompts that have become complete."""
        for complete in self._rollouts.arrived(self._streams):
            self._buffer.put(complete.number, complete)
        self._streams = [stream for stream in self._streams if stream.calls]
