"""Advantages within a group, and reward scaling."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithms.advantages import STD_EPSILON, group_advantages, leave_one_out_baseline
from megatron_grpo.algorithms.reward_functions import scale_rewards
from megatron_grpo.config.schema import RewardScalingConfig

GROUPS = st.lists(st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4), min_size=1, max_size=4)


def brute_force(group: list[float], leave_one_out: bool, normalize: bool) -> list[float]:
    """One group in plain Python floats."""
    advantages = []
    for i, reward in enumerate(group):
        others = group[:i] + group[i + 1 :] if leave_one_out else group
        advantage = reward - statistics.fmean(others)
        if normalize:
            advantage /= statistics.stdev(group) + STD_EPSILON
        advantages.append(0.0 if len(set(group)) == 1 else advantage)
    return advantages


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@settings(deadline=None)
@given(groups=GROUPS)
def test_advantages_match_brute_force(leave_one_out: bool, normalize: bool, groups: list[list[float]]) -> None:
    rewards = torch.tensor(groups, dtype=torch.float64)
    actual = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)
    expected = torch.tensor([brute_force(group, leave_one_out, normalize) for group in groups], dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    rewards = torch.tensor([[1.0, 2.0, 6.0]])
    torch.testing.assert_close(leave_one_out_baseline(rewards), torch.tensor([[4.0, 3.5, 1.5]]))


def test_a_lone_success_keeps_its_signal_with_leave_one_out() -> None:
    rewards = torch.zeros(1, 8)
    rewards[0, 3] = 1.0
    advantages = group_advantages(rewards, leave_one_out=True, normalize=True)
    # Unbiased variance of one 1 among n is 1/n, so the success is worth sqrt(n) and each failure -sqrt(n) / (n - 1).
    expected = torch.full((1, 8), -(8**0.5) / 7)
    expected[0, 3] = 8**0.5
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_give_exact_zeros(leave_one_out: bool) -> None:
    # 0.1 is no binary fraction: the mean of seven of them is not 0.1 in float32.
    advantages = group_advantages(torch.full((2, 7), 0.1), leave_one_out=leave_one_out, normalize=True)
    assert torch.equal(advantages, torch.zeros(2, 7))


def test_advantages_follow_their_samples() -> None:
    rewards = torch.rand(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    advantages = group_advantages(rewards, leave_one_out=True, normalize=True)
    torch.testing.assert_close(
        group_advantages(rewards[:, order], leave_one_out=True, normalize=True), advantages[:, order]
    )


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_nothing_to_compare_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"samples"):
        group_advantages(torch.zeros(shape), leave_one_out=False, normalize=True)


def test_rewards_are_clamped_and_mapped_linearly() -> None:
    config = RewardScalingConfig(enabled=True, source_min=-1.0, source_max=3.0, target_min=0.0, target_max=2.0)
    scaled = scale_rewards(torch.tensor([-5.0, -1.0, 0.0, 3.0, 9.0]), config)
    torch.testing.assert_close(scaled, torch.tensor([0.0, 0.0, 0.5, 2.0, 2.0]))


def test_scaling_that_is_off_changes_nothing() -> None:
    rewards = torch.tensor([-5.0, 7.0])
    assert torch.equal(scale_rewards(rewards, RewardScalingConfig(target_max=9.0)), rewards)


def test_an_empty_source_interval_is_an_error() -> None:
    with pytest.raises(ValueError, match="source_max"):
        scale_rewards(torch.zeros(1), RewardScalingConfig(enabled=True, source_min=1.0, source_max=1.0))
