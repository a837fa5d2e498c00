"""Environments that compare a response with an answer or a pattern: addition, format and math."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment
from megatron_grpo.environments.math_answers import Verifier


class AdditionEnvironment(Environment):
    """Compares texts: "095" is right for the answer "095"; "95", " 095" and "0950" are not."""

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Reward 1 for the exact answer, else 0."""
        matches = [request.response == request.extra_env_info[REFERENCE] for request in requests]
        return [EnvironmentReturn(reward=float(match), correct=match) for match in matches]


def _expression(pattern: str) -> str:
    """A text that is a regular expression.

    Raises:
        ValueError: it is none.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return pattern


class FormatEnvironment(Environment):
    """Reward 1 for a response that matches a regular expression, else 0.

    Args:
        pattern: in Python's syntax; "(?s)" at its beginning lets "." match the end of a line too.
        whole: whether the whole response has to match, or some part of it.
    """

    def __init__(self, pattern: Annotated[str, AfterValidator(_expression)], whole: bool = True) -> None:
        self._pattern, self._whole = re.compile(pattern), whole

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Reward 1 for a match, else 0."""
        match = self._pattern.fullmatch if self._whole else self._pattern.search
        found = [match(request.response) is not None for request in requests]
        return [EnvironmentReturn(reward=float(one), correct=one) for one in found]


class MathEnvironment(Environment):
    """Reward 1 when the response's final answer equals the reference in value ("1/2", "0.5", "\\\\frac12"), else 0.

    The final answer is the content of the last box, or else the last expression that math-verify finds.
    """

    def __init__(self) -> None:
        self._verifier = Verifier()

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Reward 1 for an answer equal to the reference in value, else 0."""
        right = self._verifier.verify([(one.response, str(one.extra_env_info[REFERENCE])) for one in requests])
        return [EnvironmentReturn(reward=float(one), correct=one) for one in right]
