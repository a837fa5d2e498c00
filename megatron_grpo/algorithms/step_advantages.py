"""From the trajectories of a step to the advantage of each of their tokens, as configured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_grpo.algorithms.advantages import gdpo_advantages, group_advantages, reinforce_plus_plus_advantages
from megatron_grpo.algorithms.dynamic_sampling import has_signal
from megatron_grpo.algorithms.kl import kl_estimate
from megatron_grpo.algorithms.reward_functions import scale_rewards, shape_rewards
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.rollouts.batch import reward_parts_by_group, rewards_by_group, sampled_mask
from megatron_grpo.rollouts.trajectory import Trajectory


def learning_rewards(config: Config, trajectories: Sequence[Trajectory]) -> Tensor:
    """[groups, samples]: rewards as the advantages are to see them, scaled and then shaped."""
    samples = config.loop.num_generations_per_prompt
    return shape_rewards(
        _scaled_rewards(config, trajectories),
        torch.tensor([trajectory.response_tokens for trajectory in trajectories]).view(-1, samples),
        torch.tensor([trajectory.truncated for trajectory in trajectories]).view(-1, samples),
        config.loop.reward_shaping,
        config.generation.max_new_tokens,
    )


def groups_with_signal(config: Config, trajectories: Sequence[Trajectory]) -> Tensor:
    """[groups], bool: which groups dynamic sampling keeps.

    Penalties for length do not count: responses that are all right or all wrong differ in length nearly always, and
    DAPO drops them (Yu et al. 2025, eq. 11). With GDPO, a group counts when some reward function told its samples
    apart, also where the sum is the same.
    """
    if config.grpo.adv_estimator.name == "gdpo":
        parts, _ = _parts(config, trajectories)
        lowest = torch.where(parts.isnan(), torch.inf, parts).amin(dim=2, keepdim=True)
        return (~parts.isnan() & (parts != lowest)).any(dim=2).any(dim=0)
    return has_signal(_scaled_rewards(config, trajectories))


def token_advantages(
    config: Config, trajectories: Sequence[Trajectory], rewards: Tensor, batch: SequenceBatch
) -> Tensor:
    """The advantage of every sampled token, 0 for the others.

    Args:
        trajectories: of the step; samples of a group are neighbours.
        rewards: [groups, samples], of `learning_rewards`.
        batch: of the same trajectories; with use_kl_in_reward it has reference_logprobs.

    Returns:
        [sum(batch.lengths)], float32, clipped as configured and times the loss multiplier of the trajectory.
    """
    grpo = config.grpo
    sampled = sampled_mask(trajectories)
    lengths = [trajectory.response_tokens for trajectory in trajectories]
    penalty = kl_penalty_of_tokens(config.loss_fn, batch)[sampled] if config.loss_fn.use_kl_in_reward else None
    if grpo.adv_estimator.name == "reinforce_plus_plus":
        by_token = reinforce_plus_plus_advantages(
            rewards, lengths, token_penalty=penalty, minus_baseline=grpo.adv_estimator.minus_baseline
        )
    else:
        by_token = _group_relative(config, trajectories, rewards, penalty).flatten().repeat_interleave(_counts(lengths))
    if grpo.advantage_clip_low is not None or grpo.advantage_clip_high is not None:
        by_token = by_token.clamp(grpo.advantage_clip_low, grpo.advantage_clip_high)
    multipliers = torch.tensor([trajectory.loss_multiplier for trajectory in trajectories])
    advantages = torch.zeros(len(batch.token_ids))
    advantages[sampled] = by_token.float() * multipliers.repeat_interleave(_counts(lengths))
    return advantages


def _group_relative(
    config: Config, trajectories: Sequence[Trajectory], rewards: Tensor, token_penalty: Tensor | None
) -> Tensor:
    """[groups, samples]. A KL penalty lowers the response's reward by its sum (as in RLOO, Ahmadian et al. 2024)."""
    grpo = config.grpo
    if grpo.adv_estimator.name == "gdpo":
        parts, weights = _parts(config, trajectories)
        return gdpo_advantages(parts, weights, leave_one_out=grpo.use_leave_one_out_baseline)
    if token_penalty is not None:
        lengths = [trajectory.response_tokens for trajectory in trajectories]
        rewards = rewards - torch.stack([piece.sum() for piece in token_penalty.split(lengths)]).view_as(rewards)
    return group_advantages(
        rewards,
        leave_one_out=grpo.use_leave_one_out_baseline,
        normalize=grpo.normalize_rewards,
        over_batch=grpo.normalize_rewards_over == "batch",
    )


def kl_penalty_of_tokens(loss: LossConfig, batch: SequenceBatch) -> Tensor:
    """[sum(lengths)]: the KL penalty of each token under the policy that the step begins with.

    Its log-probabilities are the training framework's when they were computed, else those that sampling reported.
    """
    policy = batch.tokens["prev_logprobs"] if "prev_logprobs" in batch.tokens else batch.tokens["generation_logprobs"]
    return loss.kl_in_reward * kl_estimate(
        policy,
        batch.tokens["reference_logprobs"],
        loss.reference_policy_kl_type,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
    )


def _parts(config: Config, trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """[functions, groups, samples] and the weights, [functions]."""
    weights = {name: weight for one in config.env.values() for name, weight in one.weights_by_function().items()}
    parts = reward_parts_by_group(trajectories, config.loop.num_generations_per_prompt, list(weights))
    return parts, torch.tensor(list(weights.values()))


def _scaled_rewards(config: Config, trajectories: Sequence[Trajectory]) -> Tensor:
    rewards = rewards_by_group(trajectories, config.loop.num_generations_per_prompt)
    return scale_rewards(rewards, config.loop.reward_scaling)


def _counts(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths)
