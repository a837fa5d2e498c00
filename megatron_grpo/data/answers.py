"""Reference answers that no response can ever equal, by the environment that compares them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def unusable_answer(kind: str, answer: Any) -> str | None:
    """Why no response can be right against an answer; None: one can.

    Args:
        kind: type of the environment ("math", "addition"); others do not compare.
        answer: the reference answer as the row has it.
    """
    check = _CHECKS.get(kind)
    return None if check is None else check(answer)


def _math(answer: Any) -> str | None:
    if isinstance(answer, bool | list | dict):
        return f"is a JSON {_KINDS[type(answer)]}, and a response is text; write the answer as text"
    if isinstance(answer, float) and not math.isfinite(answer):
        return "is not a number that can be compared; write the answer as text"
    if isinstance(answer, float) and "e" in repr(answer):
        return f"becomes the text {answer!r}, which is not read as a number; write the answer as text"
    if isinstance(answer, str) and not answer.strip():
        return "is empty"
    return None


def _addition(answer: Any) -> str | None:
    is_digits = isinstance(answer, str) and answer.isascii() and answer.isdigit()
    is_sum = isinstance(answer, int) and not isinstance(answer, bool) and answer >= 0
    return None if is_digits or is_sum else "is not the digits of a sum, and a response has to be exactly that"


_CHECKS: dict[str, Callable[[Any], str | None]] = {"math": _math, "addition": _addition}
_KINDS = {bool: "boolean", list: "array", dict: "object"}
