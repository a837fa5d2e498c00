"""What is asked of an environment and what comes back: one response to score, one score."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.data.trajectory import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRequest:
    """One response to score."""

    prompt: str | list[dict[str, str]]
    response: str
    stop_reason: StopReason
    extra_env_info: dict[str, Any]
    """Of the prompt (`DatumSpec`)."""


@dataclass(slots=True)
class EnvironmentReturn:
    """The score of one response."""

    reward: float | None
    """None: nobody had an opinion, and nothing is learnt from the response."""
    correct: bool | None
    """None: the environment cannot say."""
    parts: dict[str, float] = field(default_factory=dict)
    """Reward of each reward function that gave one, unweighted, when the reward is the sum of several."""
