"""The advantages stage of GRPO on trajectories: laid out in shards as a configuration says, and back by trajectory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.algorithms.stages import build_batch
from megatron_grpo.algorithms.step_advantages import add_advantages, score
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.schema import Config
from tests.support.fake_rollouts import FakeRollouts, add_entry, by_sequence, stored_names


def laid_out(config: Config, trajectories: list[Trajectory]) -> tuple[StepBatch, FakeRollouts]:
    """The batch of a step, and the workers that computed it."""
    rollouts: Any = FakeRollouts()
    samples = config.loop.num_generations_per_prompt
    groups = [trajectories[start : start + samples] for start in range(0, len(trajectories), samples)]
    return build_batch(config, rollouts.put(groups), rollouts), rollouts


def advantages_of(
    config: Config, trajectories: list[Trajectory], **entries: NDArray[np.float32] | list[float]
) -> list[list[float]]:
    """By trajectory, prompt tokens included; `entries` are further ones of all tokens."""
    batch, rollouts = laid_out(config, trajectories)
    for name, values in entries.items():
        add_entry(batch, name, np.asarray(values))
    workers: Any = rollouts
    finite = add_advantages(config, score(config, [trajectory.outcome for trajectory in trajectories]), batch, workers)
    assert finite.all()
    assert (batch.advantages is None) == ("advantages" in stored_names(batch)), "in one place or the other"
    if batch.advantages is None:
        return [row.tolist() for row in by_sequence(batch, "advantages")]
    assert rollouts.computed == [], "no token is looked at"
    assert batch.advantages.dtype == np.float32
    return [
        [float(advantage) if trajectory else 0.0 for trajectory in sampled]
        for advantage, sampled in zip(batch.advantages, by_sequence(batch, "sampled"), strict=True)
    ]
