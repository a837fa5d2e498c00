"""Compares mathematical answers by value, in a separate process."""

from __future__ import annotations

import logging
import re
import signal
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from sympy import Expr, FiniteSet, Interval, MatrixBase, N, Tuple
from sympy.core.relational import Relational

from megatron_grpo.cluster.limited_calls import LimitedCalls, LimitError
from megatron_grpo.data.math_text import (
    find_chosen_letter,
    find_marked_answer,
    find_statement,
    has_same_words,
    is_letter,
    list_boxes,
    rewrite_answer,
    rewrite_tail,
)

# Limits count the time on a processor: on a loaded machine an answer waits for its turn, and is no worse for that.
ANSWER_CPU_S = 5  # for parsing one answer, and again for each comparison; an answer that takes longer is wrong
PROCESS_CPU_S = 20.0  # for an answer whose computation cannot be interrupted; then the system ends the process
MEMORY_MIB = 4096  # most that the process may grow after its start; an answer that needs more is wrong
TAIL_CHARACTERS = 2000  # length of a response's end in which the answer is searched without a box

T = TypeVar("T")
_TINY, _TINY_TOLERANCE = 1e-3, 1e-3  # least number that 6 decimals show well, and relative tolerance below it

_BOX = "\\boxed{"
# A blank between two letters or digits: "2 1/2" is not "21/2", and "1 2 3" not "123".
_NEEDED_BLANK = re.compile(r"(?<=[\w.,])\s+(?=[\w.,])")
_LEAD = re.compile(r"(?:(?:so|thus|therefore|hence),? )?(?:the )?(?:final )?answer(?: is)?:? *", re.IGNORECASE)

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for every answer it cannot read


def is_correct(response: str, answer: str) -> bool:
    """Compare the response's final answer with the reference answer by value.

    Main thread only: its time is limited with SIGVTALRM, which Python delivers there. `answer` is a number, expression
    or LaTeX, without a box. Both are brought to one form first (`data.math_text`). An answer that math-verify cannot
    parse is compared as text.
    """
    final = find_final_answer(response)
    box = final.removeprefix(_BOX).removesuffix("}") if final.startswith(_BOX) else None
    letter = find_chosen_letter(response, box) if is_letter(answer) else None
    return _are_equal(final if letter is None else f"{_BOX}{letter}}}", answer)


@lru_cache(maxsize=1024)  # samples of a group often agree
def _are_equal(final: str, answer: str) -> bool:
    is_boxed = final.startswith(_BOX)
    content = final.removeprefix(_BOX).removesuffix("}") if is_boxed else final
    if _remove_blanks(answer) in (_remove_blanks(content), _remove_blanks(final)):
        return True  # most correct answers
    expected, actual = rewrite_answer(answer), rewrite_answer(content) if is_boxed else rewrite_tail(content)
    last_line = content if is_boxed else _LEAD.sub("", content.strip().rpartition("\n")[2].strip(" *"), count=1)
    if has_same_words(answer, last_line) or (is_boxed and expected == actual):
        return True
    if None not in (expected.unit, actual.unit) and expected.unit != actual.unit:
        return False
    # Where only one of the answers has a percent sign, the other may be the percentage or the share. In a text without
    # a box, percent signs beside the answer count for nothing.
    actual_has_percent = actual.has_percent
    if actual_has_percent and not is_boxed:
        actual_has_percent = _parse(actual.text) != _parse(actual.as_share)
    readings = [(expected.text, actual.text)]
    if expected.has_percent and not actual_has_percent:
        readings.append((expected.as_share, actual.text))
    if actual_has_percent and not expected.has_percent:
        readings.append((expected.text, actual.as_share))
    for expected_text, actual_text in readings:
        # math-verify's parse and verify treat sympy's errors as "not equal".
        expected_values = _parse(f"{_BOX}{expected_text}}}")
        values = _parse(f"{_BOX}{actual_text}}}" if is_boxed else actual_text)
        if _limit_cpu(partial(verify, expected_values, values, timeout_seconds=0), False):
            return not _differ_in_size(expected_values, values)
    return False


def _differ_in_size(expected_values: Sequence[Any], values: Sequence[Any]) -> bool:
    """True for tiny numbers that rounding to 6 decimals makes equal."""
    expected, numbers = (sorted(_list_numbers(next(iter(parsed), None))) for parsed in (expected_values, values))
    return len(expected) == len(numbers) and any(
        0 < abs(first) < _TINY and abs(second - first) > _TINY_TOLERANCE * abs(first)
        for first, second in zip(expected, numbers, strict=True)
    )


def _list_numbers(value: Any) -> Iterator[Any]:
    """List a number, or those in a set, interval, tuple, matrix or equation."""
    if isinstance(value, Expr):
        yield from [N(value)] if value.is_number and value.is_real else []
    elif isinstance(value, Relational):
        yield from _list_numbers(value.rhs)
    elif isinstance(value, MatrixBase | FiniteSet | Interval | Tuple):
        for part in value if isinstance(value, MatrixBase) else value.args:
            yield from _list_numbers(part)


def _remove_blanks(text: str) -> str:
    parts = _NEEDED_BLANK.split(unicodedata.normalize("NFC", text))
    return " ".join("".join(part.split()) for part in parts)


def find_final_answer(response: str) -> str:
    """Find the last \\boxed{...} of a response, with nested braces.

    Without a box, or if the last one is not closed: a number behind #### as a box; else TAIL_CHARACTERS characters,
    from the last words that announce an answer or at the response's end.
    """
    content = next(list_boxes(response), None)
    boxed = find_marked_answer(response) if content is None else content
    if boxed is not None:
        return f"{_BOX}{boxed}}}"
    # A long text may follow the answer.
    statement, end = find_statement(response), max(len(response) - TAIL_CHARACTERS, 0)
    begin = end if statement is None else min(end, statement.start())
    return response[begin : begin + TAIL_CHARACTERS]


@lru_cache(maxsize=1024)  # samples of a group share their reference answer
def _parse(text: str) -> list[Any]:
    return list(_limit_cpu(partial(parse, text, parsing_timeout=0), []))


def _limit_cpu(function: Callable[[], T], late: T) -> T:
    """Call a function of math-verify, which counts what the signal interrupts as "not equal"."""
    # `LimitedCalls` has the timer of SIGPROF.
    signal.signal(signal.SIGVTALRM, _end_computation)
    signal.setitimer(signal.ITIMER_VIRTUAL, ANSWER_CPU_S, ANSWER_CPU_S)
    try:
        return function()
    except TimeoutException:  # outside of the computations of which math-verify catches it
        return late
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _end_computation(*_: object) -> None:
    raise TimeoutException


class Verifier:
    """Compares answers in a process with limits."""

    def __init__(self, cpu_s: float = PROCESS_CPU_S) -> None:
        """Start the process; RunError if it does not start."""
        self._calls = LimitedCalls(_load, cpu_s=cpu_s, memory_mib=MEMORY_MIB)

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Call `is_correct` in the process for (response, reference answer) pairs.

        An answer on which the process hangs or dies is wrong.
        """
        return [self._compare(*pair) for pair in pairs]

    def _compare(self, response: str, answer: str) -> bool:
        try:
            return self._calls.call(_is_correct, response, answer)
        except LimitError:
            return False


def _load() -> None:
    # A first comparison loads the parsers and sympy, so that loading does not count in an answer's time limit.
    verify(parse("\\boxed{\\frac{1}{2}}", parsing_timeout=0), parse("$0.5$", parsing_timeout=0), timeout_seconds=0)


def _is_correct(_: None, response: str, answer: str) -> bool:
    try:
        return is_correct(response, answer)
    except RecursionError:
        return False
