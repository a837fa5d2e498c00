"""From scored trajectories to what the policy trains on, and to the numbers people watch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.rollouts.trajectory import Trajectory


def rewards_by_group(trajectories: Sequence[Trajectory], samples_per_prompt: int) -> Tensor:
    """[groups, samples], float32, of trajectories whose groups are neighbours."""
    rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float32)
    return rewards.view(-1, samples_per_prompt)


def to_sequence_batch(
    trajectories: Sequence[Trajectory], advantages: Tensor, *, overlong_filtering: bool
) -> SequenceBatch:
    """Lay trajectories end to end with the loss mask, sampling log-probabilities and advantages of their tokens.

    Args:
        trajectories: of one step.
        advantages: [groups, samples]; every sampled token of a trajectory gets its trajectory's.
        overlong_filtering: leave truncated responses out of the loss.
    """
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    total = sum(lengths)
    loss_mask, generation_logprobs = torch.zeros(total), torch.zeros(total)
    token_advantages = torch.zeros(total)
    begin = 0
    for trajectory, length, advantage in zip(trajectories, lengths, advantages.flatten().tolist(), strict=True):
        in_loss = trajectory.loss_multiplier > 0 and not (overlong_filtering and trajectory.truncated)
        taken = 0
        for span in trajectory.spans:
            here = slice(begin + span.start, begin + span.end)
            count = span.end - span.start
            generation_logprobs[here] = torch.tensor(trajectory.logprobs[taken : taken + count])
            token_advantages[here] = advantage * trajectory.loss_multiplier
            loss_mask[here] = float(in_loss)
            taken += count
        begin += length
    return SequenceBatch(
        lengths=lengths,
        token_ids=torch.tensor([token for trajectory in trajectories for token in trajectory.token_ids]),
        tokens={
            "loss_mask": loss_mask,
            "generation_logprobs": generation_logprobs,
            "advantages": token_advantages,
        },
    )


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Reward, accuracy and length statistics of a set of trajectories."""
    rewards = [trajectory.reward for trajectory in trajectories]
    lengths = [float(trajectory.response_tokens) for trajectory in trajectories]
    count = len(trajectories)
    return {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "accuracy": sum(trajectory.correct for trajectory in trajectories) / count,
        "response_length": statistics.fmean(lengths),
        "response_length_max": max(lengths),
        "truncation_rate": sum(trajectory.truncated for trajectory in trajectories) / count,
        "weight_version": float(max(span.version for one in trajectories for span in one.spans)),
    }


def group_metrics(rewards: Tensor) -> dict[str, float]:
    """Shares of prompts whose samples all got the same reward: those teach nothing.

    Args:
        rewards: [groups, samples].
    """
    same = rewards.max(dim=1).values == rewards.min(dim=1).values
    return {"groups_without_signal": float(same.float().mean())}
