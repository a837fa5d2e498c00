"""Scaling and shaping of rewards."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.config.loss_schema import RewardShapingConfig
from megatron_grpo.config.schema import RewardScalingConfig
from megatron_grpo.losses.advantages import scale_rewards, shape_rewards


def test_rewards_are_clamped_and_mapped_linearly() -> None:
    config = RewardScalingConfig(enabled=True, source_min=-1.0, source_max=3.0, target_min=0.0, target_max=2.0)
    scaled = scale_rewards(torch.tensor([-5.0, -1.0, 0.0, 3.0, 9.0]), config)
    torch.testing.assert_close(scaled, torch.tensor([0.0, 0.0, 0.5, 2.0, 2.0]))


def test_the_default_range_is_the_unit_interval() -> None:
    scaled = scale_rewards(torch.tensor([-0.5, 0.25, 7.0]), RewardScalingConfig(enabled=True))
    torch.testing.assert_close(scaled, torch.tensor([0.0, 0.25, 1.0]))


def test_scaling_that_is_off_changes_nothing() -> None:
    rewards = torch.tensor([-5.0, 7.0])
    assert torch.equal(scale_rewards(rewards, RewardScalingConfig(target_max=9.0)), rewards)


def test_an_empty_source_interval_is_an_error() -> None:
    with pytest.raises(ValueError, match="source_max"):
        scale_rewards(torch.zeros(1), RewardScalingConfig(enabled=True, source_min=1.0, source_max=1.0))


def dapo_penalty(length: int, longest: int, cache: int) -> float:
    """DAPO's eq. 13, by its three cases."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize("max_response_length", [None, 15])
def test_overlong_shaping_is_dapos(max_response_length: int | None) -> None:
    lengths = torch.arange(1, 21).view(2, 10)
    rewards = torch.linspace(-1, 1, 20, dtype=torch.float64).view(2, 10)
    config = RewardShapingConfig(
        enabled=True, overlong_buffer_length=6, overlong_buffer_penalty=0.5, max_response_length=max_response_length
    )
    shaped = shape_rewards(rewards, lengths, torch.zeros(2, 10, dtype=torch.bool), config, most_tokens=18)
    penalties = [dapo_penalty(length, max_response_length or 18, 6) for length in range(1, 21)]
    torch.testing.assert_close(shaped, rewards + 0.5 * torch.tensor(penalties, dtype=torch.float64).view(2, 10))


def test_only_earned_rewards_of_truncated_responses_are_reduced() -> None:
    rewards = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    truncated = torch.tensor([[True, False, True, False]])
    config = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.25)
    shaped = shape_rewards(rewards, torch.full((1, 4), 9), truncated, config, most_tokens=9)
    assert shaped.tolist() == [[0.25, 1.0, -1.0, -1.0]]


def test_shaping_that_is_off_changes_nothing() -> None:
    rewards, config = torch.ones(1, 2), RewardShapingConfig(overlong_buffer_length=1, stop_properly_penalty_coef=0.0)
    truncated = torch.ones(1, 2, dtype=torch.bool)
    assert torch.equal(shape_rewards(rewards, torch.full((1, 2), 9), truncated, config, most_tokens=9), rewards)
