"""Reward functions that fail: in the way that is hardest to see, and loudly."""

from __future__ import annotations

import math

from tests.integration.example_rewards import right


def not_a_number_for_odd_answers(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the right answer, 0 for a wrong one, NaN where the answer is an odd number."""
    return [
        math.nan if int(digits) % 2 else float(text == digits) for text, digits in zip(completions, answer, strict=True)
    ]


def right_unless_broken(completions: list[str], answer: list[str], broken: list[bool], **_: object) -> list[float]:
    """Fails at the rows that say so."""
    if any(broken):
        raise KeyError("unit")
    return right(completions, answer)
