"""Changes to rewards between the environment and the advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatron_grpo.config.schema import RewardScalingConfig


def scale_rewards(rewards: Tensor, config: RewardScalingConfig) -> Tensor:
    """Clamp to [source_min, source_max], then map that interval linearly onto [target_min, target_max].

    Args:
        rewards: any shape, floating point.
        config: the intervals; when it is not enabled the rewards come back as they are.

    Returns:
        The scaled rewards, in the shape and dtype of the rewards.

    Raises:
        ValueError: the source interval is empty.
    """
    if not config.enabled:
        return rewards
    if config.source_max <= config.source_min:
        raise ValueError(
            f"grpo.reward_scaling.source_max={config.source_max} must be above source_min={config.source_min}"
        )
    slope = (config.target_max - config.target_min) / (config.source_max - config.source_min)
    return config.target_min + (rewards.clamp(config.source_min, config.source_max) - config.source_min) * slope
