"""What an environment is: something that looks at responses and scores them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.rollouts.trajectory import StopReason


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


class EnvironmentInterface(ABC):
    """Scores responses; runs inside a Ray actor, one instance per worker."""

    @abstractmethod
    def step(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Scores in the order of the requests; never raises for what a model wrote."""
