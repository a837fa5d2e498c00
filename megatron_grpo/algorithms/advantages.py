"""From rewards to advantages: relative to the group (GRPO, RLOO), to the step (REINFORCE++), by reward part (GDPO)."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_grpo.algorithms.dynamic_sampling import has_signal

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

VARIANCE_FLOOR = 1e-8
"""REINFORCE++'s smallest variance."""


def leave_one_out_baseline(rewards: Tensor) -> Tensor:
    """Baseline of each sample from the *other* samples of its group (RLOO, Ahmadian et al. 2024, section 3).

    Args:
        rewards: [groups, samples], floating point, at least two samples.

    Returns:
        [groups, samples]: the mean reward of the group without the sample itself.
    """
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


def group_advantages(rewards: Tensor, *, leave_one_out: bool, normalize: bool, over_batch: bool = False) -> Tensor:
    """Reward minus baseline, optionally divided by a standard deviation (GRPO, Shao et al. 2024).

    The standard deviation is the unbiased one (divisor n - 1) of the *whole* group, also with the leave-one-out
    baseline: that of the other samples alone would be 0 for a lone success among failures, the sample that matters
    most. It is a scale shared by the group, so the order of the group's advantages is that of its rewards. Over the
    batch, it is that of all rewards of the step (Liu et al. 2025, "Tricks or Traps?"), which does not inflate groups
    whose rewards hardly differ.

    Args:
        rewards: [groups, samples], floating point.
        leave_one_out: baseline is the mean of the other samples (true) or of the whole group (false).
        normalize: divide by the standard deviation plus STD_EPSILON.
        over_batch: the standard deviation is that of all rewards instead of the group's.

    Returns:
        [groups, samples], the dtype of the rewards. A group whose rewards are all equal gets exact zeros, whatever
        rounding its mean suffers.

    Raises:
        ValueError: not [groups, samples], or fewer than two samples, which leaves nothing to compare.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [groups, samples], got shape {tuple(rewards.shape)}")
    if rewards.shape[1] < 2:
        raise ValueError(f"advantages within a group need at least 2 samples per prompt, got {rewards.shape[1]}")
    baseline = leave_one_out_baseline(rewards) if leave_one_out else rewards.mean(dim=1, keepdim=True)
    advantages = rewards - baseline
    if normalize:
        std = rewards.std() if over_batch else rewards.std(dim=1, keepdim=True)
        advantages = advantages / (std + STD_EPSILON)
    return torch.where(has_signal(rewards)[:, None], advantages, torch.zeros_like(advantages))


def gdpo_advantages(parts: Tensor, weights: Tensor, *, leave_one_out: bool) -> Tensor:
    """Each reward normalised within the group, then weighted, summed and normalised over the step.

    GDPO (Liu et al. 2026, "Group reward-Decoupled Normalization Policy Optimization"): normalising the sum instead, as
    GRPO does, gives combinations of rewards with the same sum the same advantage, and lets the reward of the largest
    spread drown the others.

    Args:
        parts: [functions, groups, samples], floating point; NaN where a function gave no reward. It then adds nothing
            to the sample, and takes no part in the mean and standard deviation of the group.
        weights: [functions].
        leave_one_out: baseline within the group as in `group_advantages`.

    Returns:
        [groups, samples], mean 0 and standard deviation 1 over the step; zeros when no group is informative.

    Raises:
        ValueError: fewer than two samples.
    """
    if parts.shape[2] < 2:
        raise ValueError(f"advantages within a group need at least 2 samples per prompt, got {parts.shape[2]}")
    total = sum(
        weight * _normalized_part(part, leave_one_out=leave_one_out)
        for part, weight in zip(parts, weights, strict=True)
    )
    assert isinstance(total, Tensor), "no reward functions"
    if not (total != total.flatten()[0]).any():
        return torch.zeros_like(total)
    return (total - total.mean()) / (total.std() + STD_EPSILON)


def _normalized_part(rewards: Tensor, *, leave_one_out: bool) -> Tensor:
    """[groups, samples] with NaN for no reward -> advantages within the group, 0 where there is nothing to compare."""
    given = ~rewards.isnan()
    values = torch.where(given, rewards, torch.zeros_like(rewards))
    count = given.sum(dim=1, keepdim=True)
    mean = values.sum(dim=1, keepdim=True) / count.clamp(min=1)
    deviation = torch.where(given, values - mean, torch.zeros_like(values))
    std = (deviation.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    # r_i - mean of the others = (r_i - mean) * n / (n - 1)
    scale = count / (count - 1).clamp(min=1) if leave_one_out else torch.ones_like(mean)
    lowest = torch.where(given, rewards, torch.full_like(rewards, torch.inf)).amin(dim=1, keepdim=True)
    informative = (given & (rewards != lowest)).any(dim=1, keepdim=True)
    return torch.where(informative, scale * deviation / (std + STD_EPSILON), torch.zeros_like(deviation))


def reward_to_go(token_rewards: Tensor, lengths: list[int]) -> Tensor:
    """Sum of the rewards of a token and all later ones of its response, undiscounted.

    Args:
        token_rewards: [sum(lengths)], the responses laid end to end.
        lengths: tokens of each response.

    Returns:
        [sum(lengths)], the dtype of the rewards.
    """
    return torch.cat([piece.flip(0).cumsum(0).flip(0) for piece in token_rewards.split(lengths)])


def reinforce_plus_plus_advantages(
    rewards: Tensor, lengths: list[int], *, token_penalty: Tensor | None, minus_baseline: bool
) -> Tensor:
    """Returns normalised over all tokens of the step (REINFORCE++, Hu et al. 2025).

    The return of token t is the response's reward minus the KL penalties of t and all later tokens. Mean and variance
    are taken over the tokens of all responses, the variance with divisor n and not below VARIANCE_FLOOR.

    Args:
        rewards: [groups, samples], floating point.
        lengths: tokens of each of the groups * samples responses.
        token_penalty: [sum(lengths)]: what is subtracted for each token, coefficient included; None is nothing.
        minus_baseline: subtract the mean reward of the group first ("REINFORCE++ with baseline").

    Returns:
        [sum(lengths)], the responses laid end to end.
    """
    if minus_baseline:
        rewards = group_advantages(rewards, leave_one_out=False, normalize=False)
    counts = torch.tensor(lengths, device=rewards.device)
    returns = rewards.flatten().repeat_interleave(counts)
    if token_penalty is not None:
        returns = returns - reward_to_go(token_penalty.to(returns.dtype), lengths)
    if not (returns != returns[:1]).any():
        return torch.zeros_like(returns)
    centered = returns - returns.mean()
    return centered * centered.square().mean().clamp(min=VARIANCE_FLOOR).rsqrt()
