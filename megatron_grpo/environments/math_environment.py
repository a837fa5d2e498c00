"""Scoring of mathematical answers."""

from __future__ import annotations

from megatron_grpo.data.interfaces import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment
from megatron_grpo.environments.math_verifier import Verifier


class MathEnvironment(Environment):
    """Reward 1 when the response's final answer equals the reference in value ("1/2", "0.5", "\\\\frac12"), else 0.

    The final answer is what stands in the last box, or else the last expression that math-verify finds.
    """

    def __init__(self) -> None:
        self._verifier = Verifier()

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Reward 1 for an answer equal to the reference in value, else 0."""
        right = self._verifier.verify([(one.response, str(one.extra_env_info[REFERENCE])) for one in requests])
        return [EnvironmentReturn(reward=float(one), correct=one) for one in right]
