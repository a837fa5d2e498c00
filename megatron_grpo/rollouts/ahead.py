"""Sampling ahead of training: the generation batches of coming steps are begun before anybody waits for them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_grpo.config.schema import AsyncGRPOConfig
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.rollouts.coming_steps import ComingSteps
from megatron_grpo.rollouts.group_stream import UnderWay
from megatron_grpo.rollouts.pool import RolloutPool, Timer
from megatron_grpo.rollouts.replay_buffer import ReplayBuffer


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


class SamplingAhead:
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
