"""From the trajectories of a step and their values to advantages and returns of each token, as configured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_grpo.algorithms.gae import estimate_advantages, token_rewards, whiten
from megatron_grpo.algorithms.step_advantages import kl_penalty_of_tokens
from megatron_grpo.config.schema import Config
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.rollouts.batch import sampled_mask
from megatron_grpo.rollouts.trajectory import Trajectory


def add_advantages(config: Config, trajectories: Sequence[Trajectory], rewards: Tensor, batch: SequenceBatch) -> None:
    """Fill in advantages and returns of every sampled token; 0 elsewhere.

    Advantages are normalised over the tokens in the loss, then clipped as configured, then multiplied by the loss
    multiplier of the trajectory. The arithmetic is float64, the entries are float32.

    Args:
        trajectories: of the step; samples of a prompt are neighbours.
        rewards: [groups, samples], of `learning_rewards`.
        batch: of the same trajectories, with values; with use_kl_in_reward it has reference_logprobs.
    """
    ppo = config.ppo
    sampled = sampled_mask(trajectories)
    lengths = [trajectory.response_tokens for trajectory in trajectories]
    penalty = kl_penalty_of_tokens(config.loss_fn, batch)[sampled] if config.loss_fn.use_kl_in_reward else None
    by_token = token_rewards(rewards.flatten().double(), lengths, penalty)
    values = batch.tokens["values"][sampled].double()
    estimate = estimate_advantages(by_token, values, lengths, ppo.adv_estimator)
    advantages = estimate.advantages
    if ppo.adv_estimator.normalize_advantages:
        advantages = whiten(advantages, batch.tokens["loss_mask"][sampled] > 0)
    if ppo.advantage_clip_low is not None or ppo.advantage_clip_high is not None:
        advantages = advantages.clamp(ppo.advantage_clip_low, ppo.advantage_clip_high)
    multipliers = torch.tensor([trajectory.loss_multiplier for trajectory in trajectories])
    advantages = advantages * multipliers.repeat_interleave(torch.tensor(lengths))
    for name, found in (("advantages", advantages), ("returns", estimate.returns)):
        batch.tokens[name] = torch.zeros(len(sampled))
        batch.tokens[name][sampled] = found.float()
