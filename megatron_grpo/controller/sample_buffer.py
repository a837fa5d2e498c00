"""Sampling ahead of training: the generation batches of coming steps are begun before anybody waits for them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from megatron_grpo.config.schema import AsyncGRPOConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.sampler.pool import RolloutPool, Timer, UnderWay


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingSteps:
    """The generation batches that are still to come."""

    samples_per_prompt: int
    """Responses to each prompt."""
    settings: SamplingSettings
    """How tokens are drawn."""
    run_seed: int
    """Seed of the run, from which those of the responses follow."""
    begun: int
    """Generation batches that steps have taken so far."""
    max_num_steps: int
    """Steps after which nothing is needed any more."""


Batch = TypeVar("Batch")


class ReplayBuffer(Generic[Batch]):
    """Generation batches, under way or complete, in the order of their prompts; the first one is used first.

    A batch is added when the batches before it are at most `max_age_steps`. Every step takes at least one, so its turn
    comes within as many steps, and no token of it, all of which are drawn from then on, is older when it is trained on.
    So nothing has to be thrown away, and the prompts are used in the order of the data whatever ends first.
    """

    def __init__(self, max_age_steps: int) -> None:
        """
        Args:
            max_age_steps: most steps from the weights at which a batch begins to the weights that learn from it.
        """
        self.max_age_steps = max_age_steps
        self._batches: deque[tuple[Batch, int]] = deque()
        """With the version of the weights at which each was begun."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def batches(self) -> list[Batch]:
        """All that is in the buffer, the next to be used first."""
        return [batch for batch, _ in self._batches]

    @property
    def has_room(self) -> bool:
        """Whether another batch may be begun when a step is about to take one."""
        return len(self._batches) <= self.max_age_steps

    def add(self, batch: Batch, version: int) -> None:
        """Put a batch behind the others.

        Args:
            batch: whatever stands for it.
            version: of the weights that generation has when the batch is begun.
        """
        assert self.has_room, "what is sampled further ahead becomes too old"
        self._batches.append((batch, version))

    def take(self, version: int) -> Batch:
        """The next batch, for a step that learns with the weights of this version."""
        batch, begun_at = self._batches.popleft()
        assert 0 <= version - begun_at <= self.max_age_steps, (version, begun_at)
        return batch


class Loader(Protocol):
    """Where the prompts come from, as far as its position goes (`Batches`)."""

    def state_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Begun:
    """A generation batch that is being sampled, or has been."""

    under_way: UnderWay
    prompts: int
    position: dict[str, Any]
    """State of the loader after the prompts of this batch."""


class SampleBuffer:
    """Generation batches in the order of the data, of which the next ones are under way while a step trains."""

    def __init__(
        self,
        rollouts: RolloutPool,
        loader: Loader,
        config: AsyncGRPOConfig,
        coming: ComingSteps,
    ) -> None:
        """
        Args:
            rollouts: what samples.
            loader: of the prompts that `take` is given, for its position.
            config: how old a trajectory may become.
            coming: what is asked of the prompts, and for how many steps.
        """
        self._rollouts, self._loader = rollouts, loader
        self._coming, self._number = coming, coming.begun
        self._buffer: ReplayBuffer[_Begun] = ReplayBuffer(config.max_trajectory_age_steps)
        self.position = copy.deepcopy(loader.state_dict())
        """State of the loader after the last prompts that a step has taken: those of the buffer come after it, so a run
        that resumes here samples them again, and none is lost or used twice."""

    def take(self, batches: Iterator[list[DatumSpec]], version: int, timer: Timer) -> list[SampledGroup] | None:
        """The next generation batch, as soon as it is complete; None: no prompts are left.

        Further ones are begun first, as far as the age of what they are going to be allows.

        Args:
            batches: prompts of generation batches, in the order of the data; the same iterator each time.
            version: of the weights that the step begins with, which generation has.
            timer: counts what is waited for as "generation" and "environment".

        Raises:
            SamplingError: an engine or an environment failed, or too many rollouts did.
        """
        while self._buffer.has_room and version + len(self._buffer) < self._coming.max_num_steps:
            prompts = next(batches, None)
            if prompts is None:
                break
            self._buffer.add(self._begin(prompts), version)
        if not len(self._buffer):
            return None
        batch = self._buffer.take(version)
        groups = self._rollouts.finish(batch.under_way, timer)
        self.position = batch.position
        return groups

    def metrics(self) -> dict[str, float]:
        """Prompts that are sampled already, and those that are under way, beyond what steps have taken."""
        waiting = [batch.prompts for batch in self._buffer.batches if batch.under_way.is_done()]
        all_prompts = sum(batch.prompts for batch in self._buffer.batches)
        return {"buffer_depth": float(sum(waiting)), "buffer_in_flight": float(all_prompts - sum(waiting))}

    def _begin(self, prompts: list[DatumSpec]) -> _Begun:
        self._number += 1
        under_way = self._rollouts.begin(
            prompts,
            samples_per_prompt=self._coming.samples_per_prompt,
            settings=self._coming.settings,
            run_seed=self._coming.run_seed,
            step=self._number,
        )
        return _Begun(under_way, len(prompts), copy.deepcopy(self._loader.state_dict()))
