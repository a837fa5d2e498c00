"""Mathematical answers, compared by value with math-verify."""

from __future__ import annotations

import logging
import threading
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from megatron_grpo.data.interfaces import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment

ANSWER_TIMEOUT_S = 5
"""Seconds for reading one answer, and again for comparing it; an answer that takes longer counts as wrong."""

TAIL_CHARACTERS = 2000
"""Without a box, the answer is looked for in this much text at the end of the response."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for every answer it cannot read


class MathEnvironment(Environment):
    """Reward 1 when the response's final answer equals the reference in value ("1/2", "0.5", "\\\\frac12"), else 0.

    The final answer is what stands in the last box, or else the last expression that math-verify finds. math-verify
    limits its time with SIGALRM, which Python delivers to the main thread only; Ray runs an actor's methods there.
    """

    def __init__(self) -> None:
        """
        Raises:
            RuntimeError: this is not the main thread of its process.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("MathEnvironment needs the main thread of its process: its time limit is a signal")
        # The first comparison loads parsers and half of sympy, which must not count against a model's answer.
        verify(parse("\\boxed{\\frac{1}{2}}", parsing_timeout=0), parse("$0.5$", parsing_timeout=0), timeout_seconds=0)

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Reward 1 for an answer equal to the reference in value, else 0."""
        matches = [is_correct(request.response, request.extra_env_info[REFERENCE]) for request in requests]
        return [EnvironmentReturn(reward=float(match), correct=match) for match in matches]


def is_correct(response: str, answer: str) -> bool:
    """Whether the response's final answer equals the reference in value. Main thread only.

    Args:
        response: what the model wrote, any text.
        answer: the reference: a number, expression or LaTeX, without a box. One that math-verify cannot read is
            compared as text.
    """
    return _equal(final_answer(response), answer)


@lru_cache(maxsize=1024)
def _equal(final: str, answer: str) -> bool:
    # Samples of a group often agree. Both calls turn every error of sympy, and running out of time, into "no".
    if final.strip() == answer.strip():
        return True
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
