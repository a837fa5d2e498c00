"""What an environment is: something that looks at responses and scores them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn


class EnvironmentInterface(ABC):
    """Scores responses; runs inside a Ray actor, one instance per worker."""

    @abstractmethod
    def step(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Scores in the order of the requests; never raises for what a model wrote."""
