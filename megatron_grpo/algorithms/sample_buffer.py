"""Asynchronous sampling: while a step trains, prompts of coming steps are sampled, in order or oversampled."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.batch.trajectory import SampledGroup, renumber_groups
from megatron_grpo.config.loop_schema import SampledLoopConfig
from megatron_grpo.data.loader import BatchLoader, add_waiting
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.pool import CompletePrompt, PendingBatch, RolloutPool
from megatron_grpo.rollouts.rollout import RolloutSettings


@dataclass(eq=False)
class SampleBuffer(ABC):
    """Samples of coming steps, complete or being generated."""

    rollouts: RolloutPool
    loader: BatchLoader
    loop: SampledLoopConfig
    settings: SamplingSettings
    generation_batches: int
    """Number of the newest generation batch; at construction, that of the last one that a step has taken."""
    loader_state: dict[str, Any] = field(init=False)
    """State of a loader that yields every prompt which no step has taken, for checkpoints."""

    def __post_init__(self) -> None:
        # The loader runs ahead of training by the prompts in the buffer, so a checkpoint with the loader's own state
        # would skip them. A resumed run samples them again. Their seeds come from the number of the generation batch
        # and the row of the prompt, so the requests are the same; only the weight versions of their tokens may differ.
        self.loader_state = copy.deepcopy(self.loader.state_dict())

    @abstractmethod
    def take(self, batches: Iterator[list[DatumSpec]], version: int, timer: StepTimer) -> list[SampledGroup] | None:
        """Begin prompts, then take a generation batch; None: no prompts are left.

        `batches`: prompts of generation batches, in the order of the data; the same iterator each time. `version`: that
        of the weights that the step learns with, which engines generate with now.
        """

    @abstractmethod
    def count_prompts(self) -> dict[str, float]:
        """Count the prompts in the buffer after the step took its own.

        buffer_depth: prompts sampled and waiting; buffer_in_flight: prompts still being sampled.
        """

    def _make_settings(self) -> RolloutSettings:
        samples, seed = self.loop.num_generations_per_prompt, self.loop.seed
        settings = self.rollouts.make_settings(samples, self.settings, seed, self.generation_batches)
        return replace(settings, max_age_steps=self.loop.async_grpo.max_trajectory_age_steps)


@dataclass(frozen=True, slots=True)
class _GenerationBatch:
    pending: PendingBatch
    prompts: int
    version: int  # of the engines' weights when the batch was begun
    loader_state: dict[str, Any]  # after the prompts of this batch


@dataclass(eq=False)
class OrderedBuffer(SampleBuffer):
    """Generation batches, which steps take in the order of the data.

    Nothing has to be discarded, and the order of the prompts does not depend on which response is complete first.
    """

    _batches: deque[_GenerationBatch] = field(init=False, default_factory=deque)

    def take(self, batches: Iterator[list[DatumSpec]], version: int, timer: StepTimer) -> list[SampledGroup] | None:
        # Why no sample is ever too old: a weight version is the number of steps that the policy has learnt from, so a
        # step that begins after v steps learns with version v, and v is also what engines generate with when it begins.
        # A batch is begun only while at most A = max_trajectory_age_steps batches are before it. Every step takes at
        # least one batch (several with dynamic sampling), so a batch that is begun at version v is taken by the step of
        # version v + A at the latest. All its tokens are drawn at version v or later, because a refit replaces the
        # weights under responses that are being generated; their age when they are trained on is therefore between 0
        # and A. With A = 0 the buffer holds the batch of the current step alone, which is synchronous sampling.
        max_age = self.loop.async_grpo.max_trajectory_age_steps
        while len(self._batches) <= max_age and version + len(self._batches) < self.loop.max_num_steps:
            prompts = next(batches, None)
            if prompts is None:
                break
            self.generation_batches += 1
            pending = self.rollouts.begin(dict(enumerate(prompts)), self._make_settings())
            loader_state = copy.deepcopy(self.loader.state_dict())
            self._batches.append(_GenerationBatch(pending, len(prompts), version, loader_state))
        if not self._batches:
            return None
        batch = self._batches.popleft()
        assert 0 <= version - batch.version <= max_age, (version, batch.version)
        groups = self.rollouts.finish(batch.pending, timer)
        self.loader_state = batch.loader_state
        return groups

    def count_prompts(self) -> dict[str, float]:
        complete = sum(batch.prompts for batch in self._batches if batch.pending.is_done())
        total = sum(batch.prompts for batch in self._batches)
        return {"buffer_depth": float(complete), "buffer_in_flight": float(total - complete)}


@dataclass(slots=True)
class _BufferedPrompt:
    row: int
    version: int  # of the engines' weights when the prompt was begun
    complete: CompletePrompt | None = None  # None: samples are still under way
    is_passed_over: bool = False  # True: a step has taken a later prompt before it


@dataclass(eq=False)
class FirstComplete:
    """Prompts under way, of which a step takes the oldest complete ones."""

    prompts_per_take: int  # prompts that are taken together; every step takes at least once
    max_age_steps: int  # most steps from the weights with which a prompt is begun to those that learn from it

    def __post_init__(self) -> None:
        # Prompts that no step has taken, by number, in the order of the data.
        self._prompts: dict[int, _BufferedPrompt] = {}
        self._next_number = 0
        # Counts of the last take: prompts taken that an earlier take had passed over, and prompts that it passed over
        # itself: still under way, although older than the newest one taken.
        self.resumed, self.passed_over = 0, 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def rows(self) -> list[int]:
        """Rows of the prompts in the data."""
        return [prompt.row for prompt in self._prompts.values()]

    @property
    def complete(self) -> int:
        """Number of complete prompts."""
        return sum(prompt.complete is not None for prompt in self._prompts.values())

    def add(self, row: int, version: int) -> int:
        """Record a prompt that is begun; returns its number."""
        limit = self.prompts_per_take * (self.max_age_steps + 1)
        assert len(self._prompts) < limit, "prompts begun further ahead become too old"
        self._prompts[self._next_number] = _BufferedPrompt(row, version)
        self._next_number += 1
        return self._next_number - 1

    def put(self, complete: CompletePrompt) -> None:
        """Record that a prompt is complete."""
        self._prompts[complete.number].complete = complete

    def take(self, version: int) -> list[CompletePrompt] | None:
        """Take the prompts of the next step, in the data's order.

        None: too few are complete yet. `version`: that of the weights that the step learns with.
        """
        complete = [prompt.complete for prompt in self._prompts.values() if prompt.complete is not None]
        complete = complete[: self.prompts_per_take]
        if len(complete) < self.prompts_per_take or not self._can_meet_deadlines(version):
            return None
        prompts = [self._prompts.pop(record.number) for record in complete]
        passed_over = [prompt for number, prompt in self._prompts.items() if number < complete[-1].number]
        self.resumed, self.passed_over = sum(prompt.is_passed_over for prompt in prompts), len(passed_over)
        for prompt in passed_over:
            prompt.is_passed_over = True
        assert all(0 <= version - prompt.version <= self.max_age_steps for prompt in prompts), (version, prompts)
        return complete

    def _can_meet_deadlines(self, version: int) -> bool:
        # A prompt that was begun with weights of version w must be taken by the step that learns with version
        # w + max_age at the latest. A step takes a fixed number of prompts, so deadlines can pile up: if a step took
        # only young prompts, later steps could be left with more old ones than they can take. A step therefore waits
        # until enough old prompts are complete: for every k, the prompts that it leaves over and that are due within
        # the next k steps must be no more than k steps take.
        for last in range(version, version + self.max_age_steps):
            due = [prompt for prompt in self._prompts.values() if prompt.version + self.max_age_steps <= last]
            later = self.prompts_per_take * (last - version)
            if len(due) - later > sum(prompt.complete is not None for prompt in due):
                return False
        return True


@dataclass(eq=False)
class Oversampling(SampleBuffer):
    """Keeps more prompts under way than a step takes (`FirstComplete`).

    Long responses are not aborted. They go on under the weights that are published meanwhile, for a later step.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        asynchronous = self.loop.async_grpo
        assert asynchronous.oversampling_factor is not None, "without it samples come in the order of the data"
        self._per_take = self.loader.prompts_per_batch
        self._under_way = int(asynchronous.oversampling_factor * self._per_take)
        self._buffer = FirstComplete(self._per_take, asynchronous.max_trajectory_age_steps)
        self._next_prompts: deque[DatumSpec] = deque()  # of the last generation batch, not yet begun
        self._pending: list[PendingBatch] = []  # some of their prompts are not complete

    def take(self, batches: Iterator[list[DatumSpec]], version: int, timer: StepTimer) -> list[SampledGroup] | None:
        # Prompts are begun until enough are under way, but none that no step is left to take.
        needed = self._per_take * (self.loop.max_num_steps - version)
        missing = min(self._under_way, needed) - len(self._buffer)
        while missing > 0:
            if not self._next_prompts:
                self._next_prompts.extend(next(batches, []))
                self.generation_batches += 1
            if not self._next_prompts:
                break
            prompts = [self._next_prompts.popleft() for _ in range(min(missing, len(self._next_prompts)))]
            missing -= len(prompts)
            numbered = {self._buffer.add(prompt["idx"], version): prompt for prompt in prompts}
            self._pending.append(self.rollouts.begin(numbered, self._make_settings()))
        if not len(self._buffer):
            return None
        since = time.monotonic()
        with timer.phase("generation"):
            self._record_arrivals()
            while (complete := self._buffer.take(version)) is None:
                self.rollouts.wait_for_groups(self._pending, since)
                self._record_arrivals()
            groups = self.rollouts.take(complete)
        # Steps take prompts out of order, so a resumed run first samples those that were begun or read and not taken.
        waiting = [*self._buffer.rows, *(prompt["idx"] for prompt in self._next_prompts)]
        self.loader_state = add_waiting(self.loader.state_dict(), waiting)
        return renumber_groups(groups)

    def count_prompts(self) -> dict[str, float]:
        return {
            "buffer_depth": float(self._buffer.complete),
            "buffer_in_flight": float(len(self._buffer) - self._buffer.complete),
            "oversampling_left_over": float(self._buffer.passed_over),
            "oversampling_resumed": float(self._buffer.resumed),
        }

    def _record_arrivals(self) -> None:
        for complete in self.rollouts.list_complete(self._pending):
            self._buffer.put(complete)
        self._pending = [batch for batch in self._pending if batch.streams]
