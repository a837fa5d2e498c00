"""Asynchronous sampling in the order of the data: batches of coming steps are sampled while a step trains."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_grpo.config.loop_schema import LoopConfig
from megatron_grpo.data.loader import Batches
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.sampler.pool import RolloutPool, UnderWay


@dataclass(frozen=True, slots=True)
class _Batch:
    """A generation batch that is being sampled, or has been."""

    under_way: UnderWay
    prompts: int
    version: int
    """Version of the engines' weights when the batch was begun."""
    position: dict[str, Any]
    """State of the loader after the prompts of this batch."""


class SampleBuffer:
    """Generation batches, under way or complete, in the order of the data; steps take them in this order.

    Why no sample is ever too old: a weight version is the number of steps that the policy has learnt from, so a step
    that begins after v steps learns with version v, and v is also what engines generate with when it begins. A batch
    is begun only while at most A = max_trajectory_age_steps batches are before it. Every step takes at least one batch
    (several with dynamic sampling), so a batch that is begun at version v is taken by the step of version v + A at the
    latest. All its tokens are drawn at version v or later, because a refit replaces the weights under responses that
    are being generated; their age when they are trained on is therefore between 0 and A. Nothing has to be discarded,
    and the order of the prompts does not depend on which response is complete first. With A = 0 the buffer holds the
    batch of the current step alone, which is synchronous sampling.

    Why a resumed run loses and repeats no prompt: the loader runs ahead of training by the batches in the buffer, so
    its own state would skip them. A checkpoint saves `position` instead, the loader's state after the last batch that
    a step took. A resumed run samples the batches of the buffer again. Their seeds come from the number of the
    generation batch and the row of the prompt, so the requests are the same; only the weight versions of their tokens
    may differ.
    """

    def __init__(
        self, rollouts: RolloutPool, loader: Batches, loop: LoopConfig, settings: SamplingSettings, begun: int
    ) -> None:
        """
        Args:
            rollouts: samples the batches.
            loader: loader of the prompts that `take` is given, for its position.
            loop: samples per prompt, seed, last step, and the greatest age of a trajectory in steps.
            settings: how tokens are drawn.
            begun: generation batches that steps have taken before.
        """
        self._rollouts, self._loader, self._loop, self._settings = rollouts, loader, loop, settings
        self._number = begun
        self._batches: deque[_Batch] = deque()
        self.position = copy.deepcopy(loader.state_dict())
        """State of the loader after the last prompts that a step has taken, for checkpoints."""

    def take(self, batches: Iterator[list[DatumSpec]], version: int, timer: StepTimer) -> list[SampledGroup] | None:
        """Begin as many batches as their age allows, and wait for the next one; None: no prompts are left.

        Args:
            batches: prompts of generation batches, in the order of the data; the same iterator each time.
            version: version of the weights that the step learns with, which engines generate with now.
            timer: counts the waiting as "generation" and "environment".

        Raises:
            SamplingError: an engine or an environment failed, or too many rollouts did.
        """
        max_age = self._loop.async_grpo.max_trajectory_age_steps
        while len(self._batches) <= max_age and version + len(self._batches) < self._loop.max_num_steps:
            prompts = next(batches, None)
            if prompts is None:
                break
            self._begin(prompts, version)
        if not self._batches:
            return None
        batch = self._batches.popleft()
        assert 0 <= version - batch.version <= max_age, (version, batch.version)
        groups = self._rollouts.finish(batch.under_way, timer)
        self.position = batch.position
        return groups

    def metrics(self) -> dict[str, float]:
        """Prompts in the buffer: those that are sampled already, and those that are under way."""
        complete = sum(batch.prompts for batch in self._batches if batch.under_way.is_done())
        all_prompts = sum(batch.prompts for batch in self._batches)
        return {"buffer_depth": float(complete), "buffer_in_flight": float(all_prompts - complete)}

    def _begin(self, prompts: list[DatumSpec], version: int) -> None:
        self._number += 1
        under_way = self._rollouts.begin(
            prompts,
            samples_per_prompt=self._loop.num_generations_per_prompt,
            settings=self._settings,
            run_seed=self._loop.seed,
            step=self._number,
        )
        position = copy.deepcopy(self._loader.state_dict())
        self._batches.append(_Batch(under_way, len(prompts), version, position))
