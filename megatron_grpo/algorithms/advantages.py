"""Advantages of the samples of a group relative to each other."""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""


def leave_one_out_baseline(rewards: Tensor) -> Tensor:
    """Baseline of each sample from the *other* samples of its group (RLOO, Ahmadian et al. 2024, section 3).

    Args:
        rewards: [groups, samples], floating point, at least two samples.

    Returns:
        [groups, samples]: the mean reward of the group without the sample itself.
    """
    return (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


def group_advantages(rewards: Tensor, *, leave_one_out: bool, normalize: bool) -> Tensor:
    """Reward minus baseline, optionally divided by the group's standard deviation (GRPO, Shao et al. 2024).

    The standard deviation is the unbiased one (divisor samples - 1) of the *whole* group, also with the leave-one-out
    baseline: that of the other samples alone would be 0 for a lone success among failures, the sample that matters
    most. It is a scale shared by the group, so the order of the group's advantages is that of its rewards.

    Args:
        rewards: [groups, samples], floating point.
        leave_one_out: baseline is the mean of the other samples (true) or of the whole group (false).
        normalize: divide by the standard deviation plus STD_EPSILON.

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
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + STD_EPSILON)
    all_equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(all_equal, torch.zeros_like(advantages), advantages)
