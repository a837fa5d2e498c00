"""Whether a response has a form, as a regular expression says it."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment


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
