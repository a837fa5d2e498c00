"""From the trajectories of a step and their values to advantages and returns of each token, as configured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_grpo.algorithms.step_advantages import clipped, kl_penalty_of_sampled, to_batch
from megatron_grpo.config.schema import Config
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.losses.gae import estimate_advantages, token_rewards, whiten
from megatron_grpo.rollouts.batch import sampled_mask


def add_advantages(config: Config, trajectories: Sequence[Trajectory], rewards: Tensor, batch: SequenceBatch) -> None:
    """Fill in advantages and returns of every sampled token; 0 elsewhere.

    Advantages are normalised over the tokens in the loss, then clipped as configured, then multiplied by the loss
    multiplier of the trajectory. The arithmetic is float64, on the GPU with calculate_advantages_on_gpu; the entries
    are float32 on the CPU.

    Args:
        trajectories: of the step; samples of a prompt are neighbours.
        rewards: [groups, samples], of `learning_rewards`.
        batch: of the same trajectories, with values; with use_kl_in_reward also prev_logprobs and reference_logprobs.
    """
    ppo = config.ppo
    device = torch.device("cuda" if ppo.calculate_advantages_on_gpu else "cpu")
    sampled = sampled_mask(trajectories)
    lengths = [trajectory.response_tokens for trajectory in trajectories]
    known = rewards.flatten().double().nan_to_num(nan=0.0)  # a response without a reward is not in the loss
    by_token = token_rewards(known, lengths, kl_penalty_of_sampled(config, batch, sampled)).to(device)
    values = batch.tokens["values"][sampled].double().to(device)
    estimate = estimate_advantages(by_token, values, lengths, ppo.adv_estimator)
    advantages = estimate.advantages
    if ppo.adv_estimator.normalize_advantages:
        advantages = whiten(advantages, (batch.tokens["loss_mask"][sampled] > 0).to(device))
    advantages = clipped(advantages.cpu(), ppo)
    batch.tokens |= {"advantages": to_batch(advantages, sampled), "returns": to_batch(estimate.returns, sampled)}
