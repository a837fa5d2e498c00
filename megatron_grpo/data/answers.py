"""Reference answers that no response can ever equal, by the environment that compares them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


def unusable_answer(kind: str, answer: Any) -> str | None:
    """Why no response can be right against an answer; None: one can.

    Args:
        kind: type of the environment ("math", "addition", "code"); others do not compare.
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


def _code(answer: Any) -> str | None:
    try:
        return None if code_tests(answer) else "is empty"
    except ValueError as error:
        return str(error)


def code_tests(answer: Any) -> list[str | tuple[str, str]]:
    """The tests that a reference answer of the code environment holds: Python statements, or (input, output).

    Args:
        answer: a text or a list of texts; a list of {"input", "output"}, or {"inputs": [...], "outputs": [...]}; or
            JSON text of a list or an object like these.

    Raises:
        ValueError: it is nothing of this.
    """
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        try:
            answer = json.loads(answer)
        except RecursionError as error:  # thousands of brackets
            raise ValueError(f"is no JSON that can be read: {error}") from None
    if isinstance(answer, str):
        answer = [answer] if answer.strip() else []
    if isinstance(answer, dict) and _are_lists(answer.get("inputs"), answer.get("outputs")):
        pairs = zip(answer["inputs"], answer["outputs"], strict=True)
        answer = [{"input": given, "output": expected} for given, expected in pairs]
    if isinstance(answer, list):
        if all(isinstance(one, str) for one in answer):
            return list(answer)
        if all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in answer):
            return [(str(one["input"]), str(one["output"])) for one in answer]
    raise ValueError("is neither Python tests nor cases of input and output")


def _are_lists(*values: Any) -> bool:
    return all(isinstance(value, list) for value in values)


_CHECKS: dict[str, Callable[[Any], str | None]] = {"math": _math, "addition": _addition, "code": _code}
_KINDS = {bool: "boolean", list: "array", dict: "object"}
