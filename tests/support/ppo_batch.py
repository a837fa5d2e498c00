"""Three responses with rewards and values, and what PPO makes of them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_grpo.algorithms.ppo_advantages import add_advantages
from megatron_grpo.config.schema import Config, LossConfig, PPOConfig
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.rollouts.batch import to_sequence_batch
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


def advantages_of(config: Config) -> SequenceBatch:
    trajectories = make_trajectories()
    batch = to_sequence_batch(trajectories, overlong_filtering=config.ppo.overlong_filtering)
    batch.tokens["values"] = VALUES.clone()
    batch.tokens["prev_logprobs"] = batch.tokens["generation_logprobs"].clone()
    batch.tokens["reference_logprobs"] = batch.tokens["generation_logprobs"] - 0.25
    add_advantages(config, trajectories, torch.tensor(REWARDS)[:, None], batch)
    return batch


def make_config(estimator: dict[str, Any], loss: dict[str, Any] | None = None, **ppo: Any) -> Config:
    config = Config(algorithm="ppo", ppo=PPOConfig(**ppo), loss_fn=LossConfig(**(loss or {})))
    for name, value in estimator.items():
        setattr(config.ppo.adv_estimator, name, value)
    return config
