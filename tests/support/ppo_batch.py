"""Three responses with rewards and values, and what PPO makes of them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.algorithms.stages import build_batch
from megatron_grpo.algorithms.step_advantages import add_advantages, score
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.schema import Config, LossConfig, PPOConfig
from tests.support.fake_models import fetched
from tests.support.fake_rollouts import FakeRollouts, add_entry, by_sequence
from tests.support.trajectories import make_trajectory

PROMPT, LENGTHS, REWARDS = 2, [3, 1, 2], [1.0, 0.0, 0.5]
VALUES = torch.tensor([0.0, 0.0, 0.3, 0.2, 0.6, 0.0, 0.0, 0.4, 0.0, 0.0, 0.1, -0.2])


def make_trajectories() -> list[Trajectory]:
    return [
        make_trajectory(
            length,
            prompt_tokens=PROMPT,
            prompt_idx=i,
            group=i,
            logprobs=[-0.5] * length,
            stop_reason="length" if i == 1 else "stop",
            reward=reward,
        )
        for i, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True))
    ]


def advantages_of(config: Config) -> dict[str, Tensor]:
    """Entries of the batch by name, flat and in the order of the responses: advantages, returns and loss_mask."""
    rollouts: Any = FakeRollouts()
    groups = rollouts.put([[trajectory] for trajectory in make_trajectories()])
    batch = build_batch(config, groups, rollouts)
    generation = np.concatenate(by_sequence(batch, "generation_logprobs"))
    add_entry(batch, "values", VALUES.numpy())
    add_entry(batch, "prev_logprobs", generation)
    add_entry(batch, "reference_logprobs", generation - np.float32(0.25))
    scores = score(config, [outcome for group in groups for outcome in group.outcomes])
    add_advantages(config, scores, batch, rollouts)
    tokens = fetched(batch, np.arange(len(batch)), ("sampled", "advantages", "returns"))
    return tokens.fields.as_dict()


def make_config(estimator: dict[str, Any], loss: dict[str, Any] | None = None, **ppo: Any) -> Config:
    config = Config(algorithm="ppo", ppo=PPOConfig(**ppo), loss_fn=LossConfig(**(loss or {})))
    for name, value in estimator.items():
        setattr(config.ppo.adv_estimator, name, value)
    return config
