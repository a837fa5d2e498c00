"""From the trajectories of a step to the advantage of each of their tokens, as configured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_grpo.config.loop_schema import LoopConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.losses.advantages import (
    gdpo_advantages,
    gdpo_scores,
    group_advantages,
    reinforce_plus_plus_advantages,
)
from megatron_grpo.losses.kl import kl_estimate
from megatron_grpo.losses.reward_shaping import scale_rewards, shape_rewards
from megatron_grpo.losses.signal import has_signal
from megatron_grpo.rollouts.batch import reward_parts_by_group, rewards_by_group, sampled_mask


def learning_rewards(config: Config, trajectories: Sequence[Trajectory]) -> Tensor:
    """[groups, samples]: rewards as the advantages are to see them, scaled and then shaped; NaN where there is none."""
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

    A group counts when its rewards differ before and after shaping. Penalties for length alone do not make a signal:
    responses that are all right or all wrong differ in length nearly always, and DAPO drops them (Yu et al. 2025, eq.
    11). They may take one away. With GDPO, a group counts when its functions tell its samples apart: also where the sum
    of the rewards is the same, and not where their normalised rewards cancel out.
    """
    if _compares_parts(config):
        return has_signal(gdpo_scores(*_parts(config, trajectories)))
    return has_signal(_scaled_rewards(config, trajectories)) & has_signal(learning_rewards(config, trajectories))


def signal_metrics(config: Config, trajectories: Sequence[Trajectory], rewards: Tensor) -> dict[str, float]:
    """groups_without_signal: share of prompts whose samples all got the same reward (with GDPO, the same advantage).

    Left out with one sample to a prompt.

    Args:
        rewards: [groups, samples], of `learning_rewards`.
    """
    if rewards.shape[1] == 1:
        return {}
    seen = gdpo_scores(*_parts(config, trajectories)) if _compares_parts(config) else rewards
    return {"groups_without_signal": float((~has_signal(seen)).float().mean())}


def token_advantages(
    config: Config, trajectories: Sequence[Trajectory], rewards: Tensor, batch: SequenceBatch
) -> Tensor:
    """The advantage of every sampled token, 0 for the others.

    Args:
        trajectories: of the step; samples of a group are neighbours.
        rewards: [groups, samples], of `learning_rewards`.
        batch: of the same trajectories; with use_kl_in_reward it has prev_logprobs and reference_logprobs.

    Returns:
        [sum(batch.lengths)], float32, clipped as configured.
    """
    sampled, estimator = sampled_mask(trajectories), config.grpo.adv_estimator
    lengths = [trajectory.response_tokens for trajectory in trajectories]
    penalty = kl_penalty_of_sampled(config, batch, sampled)
    if estimator.name == "reinforce_plus_plus":
        by_token = reinforce_plus_plus_advantages(
            rewards, lengths, token_penalty=penalty, minus_baseline=estimator.minus_baseline
        )
    else:
        by_response = _group_relative(config, trajectories, rewards, penalty).flatten()
        by_token = by_response.repeat_interleave(torch.tensor(lengths))
    return to_batch(clipped(by_token, config.loop), sampled)


def kl_penalty_of_sampled(config: Config, batch: SequenceBatch, sampled: Tensor) -> Tensor | None:
    """[sampled tokens]: what use_kl_in_reward subtracts for each, under the policy that the step begins with.

    None: nothing.
    """
    loss = config.loss_fn
    if not loss.use_kl_in_reward:
        return None
    penalty = loss.kl_in_reward * kl_estimate(
        batch.tokens["prev_logprobs"],
        batch.tokens["reference_logprobs"],
        loss.reference_policy_kl_type,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
    )
    return penalty[sampled]


def clipped(by_token: Tensor, loop: LoopConfig) -> Tensor:
    """Advantages, clipped as configured."""
    if loop.advantage_clip_low is None and loop.advantage_clip_high is None:
        return by_token
    return by_token.clamp(loop.advantage_clip_low, loop.advantage_clip_high)


def to_batch(by_token: Tensor, sampled: Tensor) -> Tensor:
    """An entry of a batch, float32 on the CPU, from values of its sampled tokens; 0 for the others."""
    entry = torch.zeros(len(sampled))
    entry[sampled] = by_token.float().cpu()
    return entry


def _group_relative(
    config: Config, trajectories: Sequence[Trajectory], rewards: Tensor, token_penalty: Tensor | None
) -> Tensor:
    """[groups, samples]. A KL penalty lowers the response's reward by its sum (as in RLOO, Ahmadian et al. 2024)."""
    grpo = config.grpo
    if _compares_parts(config):
        return gdpo_advantages(*_parts(config, trajectories))
    if token_penalty is not None:
        lengths = [trajectory.response_tokens for trajectory in trajectories]
        rewards = rewards - torch.stack([piece.sum() for piece in token_penalty.split(lengths)]).view_as(rewards)
    return group_advantages(
        rewards,
        leave_one_out=grpo.use_leave_one_out_baseline,
        normalize=grpo.normalize_rewards,
        over_batch=grpo.normalize_rewards_over == "batch",
    )


def _compares_parts(config: Config) -> bool:
    return config.grpo.adv_estimator.name == "gdpo"


def _parts(config: Config, trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """[functions, groups, samples] and the weights, [functions]."""
    weights = {name: weight for one in config.env.values() for name, weight in one.weights_by_function().items()}
    parts = reward_parts_by_group(trajectories, config.loop.num_generations_per_prompt, list(weights))
    return parts, torch.tensor(list(weights.values()))


def _scaled_rewards(config: Config, trajectories: Sequence[Trajectory]) -> Tensor:
    rewards = rewards_by_group(trajectories, config.loop.num_generations_per_prompt)
    return scale_rewards(rewards, config.loop.reward_scaling)
