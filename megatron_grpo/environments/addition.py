"""The addition task: a response is right when it is exactly the digits of the answer."""

from __future__ import annotations

from megatron_grpo.data.interfaces import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment


class AdditionEnvironment(Environment):
    """Compares texts: "095" is right for the answer "095"; "95", " 095" and "0950" are not."""

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Reward 1 for the exact answer, else 0."""
        matches = [request.response == request.extra_env_info[REFERENCE] for request in requests]
        return [EnvironmentReturn(reward=float(match), correct=match) for match in matches]
