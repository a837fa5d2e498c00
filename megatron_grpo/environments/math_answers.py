"""Mathematical answers, compared by value with math-verify."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

ANSWER_TIMEOUT_S = 5
"""Seconds for reading one answer, and again for comparing it; an answer that takes longer counts as wrong."""

TAIL_CHARACTERS = 2000
"""Without a box, the answer is looked for in this much text at the end of the response."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for every answer it cannot read


def load_parsers() -> None:
    """Load parsers and half of sympy, as the first comparison does; that must not count against a model's answer."""
    verify(parse("\\boxed{\\frac{1}{2}}", parsing_timeout=0), parse("$0.5$", parsing_timeout=0), timeout_seconds=0)


def is_correct(response: str, answer: str) -> bool:
    """Whether the response's final answer equals the reference in value.

    Main thread only: math-verify limits its time with SIGALRM, which Python delivers there.

    Args:
        response: what the model wrote, any text.
        answer: the reference: a number, expression or LaTeX, without a box. One that math-verify cannot read is
            compared as text.
    """
    return _equal(final_answer(response), answer)


@lru_cache(maxsize=1024)
def _equal(final: str, answer: str) -> bool:
    # Samples of a group often agree. Both calls turn every error of sympy, and running out of time, into "no".
    content = final.removeprefix("\\boxed{").removesuffix("}") if final.startswith("\\boxed{") else final
    if answer.strip() in (content.strip(), final.strip()):
        return True  # what most right answers are, and no answer differs from itself
    given = parse(final, parsing_timeout=ANSWER_TIMEOUT_S)
    return bool(verify(_parse_reference(answer), given, timeout_seconds=ANSWER_TIMEOUT_S))


def final_answer(response: str) -> str:
    """The last box of a response, box included, whatever nests in it; without a complete one, the response's tail."""
    start = response.rfind("\\boxed{")
    if start >= 0:
        depth = 0
        for position in range(start + len("\\boxed"), len(response)):
            depth += {"{": 1, "}": -1}.get(response[position], 0)
            if depth == 0:
                return response[start : position + 1]
    return response[-TAIL_CHARACTERS:]


@lru_cache(maxsize=1024)
def _parse_reference(answer: str) -> list[Any]:
    # All samples of a group share their reference.
    return list(parse(f"\\boxed{{{answer}}}", parsing_timeout=ANSWER_TIMEOUT_S))
