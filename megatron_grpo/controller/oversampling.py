"""More prompts under way than a step takes: it learns from the first that are complete, and the others go on.

Nothing of a long response is thrown away: it goes on under the weights that are published meanwhile, as every response
does that is under way, and a later step takes it.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from megatron_grpo.config.schema import AsyncGRPOConfig
from megatron_grpo.controller.sample_buffer import ComingSteps
from megatron_grpo.data.loader import Batches, with_waiting
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.trajectory import SampledGroup, renumbered
from megatron_grpo.sampler.pool import Complete, GroupStream, RolloutPool, Timer

Group = TypeVar("Group")


@dataclass(slots=True)
class _Begun(Generic[Group]):
    """A prompt that is being sampled, or has been."""

    row: int
    version: int
    """Of the weights that generation had when it was begun."""
    group: Group | None = None
    """What came of it; None: not yet complete."""
    left_over: bool = False
    """Whether a step has taken a later prompt before it."""


@dataclass(frozen=True, slots=True)
class Taken(Generic[Group]):
    """What a step gets."""

    groups: list[Group]
    """In the order of their prompts in the data."""
    resumed: int
    """Groups that an earlier step has left over: they went on under the weights that it published."""
    left_over: int
    """Prompts that were begun before the last one that is taken, and go on."""


class FirstComplete(Generic[Group]):
    """Prompts under way, of which a step takes `prompts_per_take` that are complete, the oldest ones first.

    A prompt that was begun with the weights of version w is taken for the step that learns with w + max_age_steps at
    the latest. So that no step has more of them to take than it can: those that have to be gone within the next k
    steps are never more than k steps take. A step waits where too few of the oldest are complete for that.
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
        """A prompt is begun, with the weights of this version.

        Returns:
            A number for it.
        """
        assert len(self._begun) < self._per_take * (self._max_age + 1), "what is sampled further ahead becomes too old"
        self._begun[self._next] = _Begun(row, version)
        self._next += 1
        return self._next - 1

    def put(self, number: int, group: Group) -> None:
        """This is what came of a prompt."""
        self._begun[number].group = group

    def take(self, version: int) -> Taken[Group] | None:
        """What a step trains on that learns with the weights of this version; None: too little is complete yet."""
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
        """Whether what remains, when the oldest complete ones are taken, can be taken in time by the steps to come."""
        for last in range(version, version + self._max_age):
            due = [one for one in self._begun.values() if one.version + self._max_age <= last]
            later = self._per_take * (last - version)
            if len(due) - later > sum(one.group is not None for one in due):
                return False
        return True


class Oversampling:
    """Prompts that are begun in the order of the data, and taken as they are complete (`FirstComplete`)."""

    def __init__(
        self,
        rollouts: RolloutPool,
        loader: Batches,
        config: AsyncGRPOConfig,
        coming: ComingSteps,
    ) -> None:
        """
        Args:
            rollouts: what samples.
            loader: of the prompts that `take` is given, for its position and the size of its batches.
            config: how many are under way, and how old a trajectory may become.
            coming: what is asked of the prompts, and for how many steps.
        """
        assert config.oversampling_factor is not None, "without it samples come in the order of the data"
        self._rollouts, self._loader = rollouts, loader
        self._coming, self._number = coming, coming.begun
        self._per_take = loader.prompts_per_batch
        self._under_way = int(config.oversampling_factor * self._per_take)
        self._buffer: FirstComplete[Complete] = FirstComplete(self._per_take, config.max_trajectory_age_steps)
        self._next: deque[DatumSpec] = deque()
        """What remains of the generation batch that was begun last."""
        self._streams: list[GroupStream] = []
        self._taken: Taken[Complete] = Taken([], 0, 0)
        self.position = copy.deepcopy(loader.state_dict())
        """State of the loader from which all prompts follow that no step has taken: a run that resumes here samples
        those again that were under way, before any other."""

    def take(self, batches: Iterator[list[DatumSpec]], version: int, timer: Timer) -> list[SampledGroup] | None:
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
        """When the step got its samples: what was complete and under way beyond them, and which it took out of turn."""
        return {
            "buffer_depth": float(self._buffer.complete),
            "buffer_in_flight": float(len(self._buffer) - self._buffer.complete),
            "oversampling_left_over": float(self._taken.left_over),
            "oversampling_resumed": float(self._taken.resumed),
        }

    def _begin(self, batches: Iterator[list[DatumSpec]], version: int) -> None:
        """Begin as many prompts as are missing, with the seeds of the generation batches that they are in."""
        needed = self._per_take * (self._coming.max_num_steps - version)
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
                samples_per_prompt=self._coming.samples_per_prompt,
                settings=self._coming.settings,
                run_seed=self._coming.run_seed,
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
        """See what has become complete."""
        for complete in self._rollouts.arrived(self._streams):
            self._buffer.put(complete.number, complete)
        self._streams = [stream for stream in self._streams if stream.calls]
