"""Changes to rewards between the environment and the advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_grpo.config.loss_schema import RewardScalingConfig, RewardShapingConfig


def scale_rewards(rewards: Tensor, config: RewardScalingConfig) -> Tensor:
    """Clamp to [source_min, source_max], then map that interval linearly onto [target_min, target_max].

    Args:
        rewards: [...], floating point, of any shape.
        config: the intervals; when it is not enabled the rewards come back as they are.

    Returns:
        [...], the scaled rewards, in shape and dtype of the given ones.

    Raises:
        ValueError: the source interval is empty.
    """
    if not config.enabled:
        return rewards
    if config.source_max <= config.source_min:
        raise ValueError(
            f"grpo.reward_scaling.source_max={config.source_max} must be above source_min={config.source_min}"
        )
    # Clamped before the map: a target interval may be turned round (target_max below target_min), the source may not.
    slope = (config.target_max - config.target_min) / (config.source_max - config.source_min)
    return config.target_min + (rewards.clamp(config.source_min, config.source_max) - config.source_min) * slope


def shape_rewards(
    rewards: Tensor, response_tokens: Tensor, truncated: Tensor, config: RewardShapingConfig, max_new_tokens: int
) -> Tensor:
    """DAPO's soft overlong punishment, or the stop-properly penalty.

    Overlong (Yu et al. 2025, eq. 13), with L = max_response_length, B = overlong_buffer_length and length n::

        reward - overlong_buffer_penalty * clamp((n - (L - B)) / B, 0, 1)

    Stop properly: a positive reward of a truncated response is multiplied by stop_properly_penalty_coef. A negative one
    stays, because a factor below 1 would reward running into the limit.

    Args:
        rewards: [groups, samples], floating point.
        response_tokens: [groups, samples], int64: sampled tokens of each response.
        truncated: [groups, samples], bool: cut off by a length limit.
        config: which penalty; when it is not enabled the rewards come back as they are.
        max_new_tokens: L when the configuration has none.

    Returns:
        [groups, samples], the dtype of the rewards.
    """
    if not config.enabled:
        return rewards
    if config.stop_properly_penalty_coef is not None:
        punished = truncated & (rewards > 0)
        rewards = torch.where(punished, rewards * config.stop_properly_penalty_coef, rewards)
    if config.overlong_buffer_length is not None:
        free = (config.max_response_length or max_new_tokens) - config.overlong_buffer_length
        # Clamped to [0, 1]: within the free length nothing is taken, and beyond the buffer no more than the penalty.
        excess = ((response_tokens - free) / config.overlong_buffer_length).clamp(0, 1)
        rewards = rewards - config.overlong_buffer_penalty * excess.to(rewards.dtype)
    return rewards
