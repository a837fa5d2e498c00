"""Whether a response has a form, as a regular expression says it."""

from __future__ import annotations

import re

from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment


class FormatEnvironment(Environment):
    """Reward 1 for a response that matches a regular expression, else 0.

    Args:
        pattern: in Python's syntax; "(?s)" at its beginning lets "." match the end of a line too.
        whole: whether the whole response has to match, or some part of it.
    """

    def __init__(self, pattern: str, whole: bool = True) -> None:
        """
        Raises:
            ValueError: the pattern is no regular expression.
        """
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"options.pattern={pattern} is no regular expression: {error}") from error
        self._whole = whole

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Reward 1 for a match, else 0."""
        match = self._pattern.fullmatch if self._whole else self._pattern.search
        found = [match(request.response) is not None for request in requests]
        return [EnvironmentReturn(reward=float(one), correct=one) for one in found]
