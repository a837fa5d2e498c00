"""A reward function that fails in the way that is hardest to see."""

from __future__ import annotations

import math


def not_a_number_for_odd_answers(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for the right answer, 0 for a wrong one, NaN where the answer is an odd number."""
    return [
        math.nan if int(right) % 2 else float(text == right) for text, right in zip(completions, answer, strict=True)
    ]
