"""The keys that turn rewards into advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.section import NonNegativeFloat, Positive, Section


@dataclass(kw_only=True)
class RewardScalingConfig(Section):
    """Clamp rewards to the source range, then map it linearly onto the target range."""

    enabled: bool = False
    """Whether rewards are scaled."""

    source_min: float = 0.0
    """Rewards below this are raised to it."""

    source_max: float = 1.0
    """Rewards above this are lowered to it."""

    target_min: float = 0.0
    """Reward that source_min is mapped to."""

    target_max: float = 1.0
    """Reward that source_max is mapped to."""


@dataclass(kw_only=True)
class RewardShapingConfig(Section):
    """Penalties for long or unfinished responses, after the scaling."""

    enabled: bool = False
    """Whether rewards are shaped."""

    overlong_buffer_length: Positive | None = None
    """DAPO: tokens before max_response_length over which the penalty grows from 0 to its full size; null is off."""

    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """DAPO: the full penalty, subtracted from the reward of a response of max_response_length tokens."""

    max_response_length: Positive | None = None
    """DAPO: tokens at which the penalty is full; null: generation.max_new_tokens."""

    stop_properly_penalty_coef: Annotated[float, Field(ge=0, le=1)] | None = None
    """Positive rewards of truncated responses are multiplied by this: 0 takes them away, 1 and null change nothing."""


@dataclass(kw_only=True)
class AdvantageEstimatorConfig(Section):
    """How rewards become advantages."""

    name: Literal["grpo", "reinforce_plus_plus", "gdpo"] = "grpo"
    """grpo: relative to the group; reinforce_plus_plus: normalised over the tokens of the step; gdpo: each reward
    function normalised within the group, then the weighted sum over the step."""

    minus_baseline: bool = False
    """REINFORCE++ only: subtract the mean reward of the group first (the variant with baseline)."""
