"""Compares mathematical answers by value, in a separate process."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import unicodedata
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from sympy import Expr, FiniteSet, Interval, MatrixBase, N, Tuple
from sympy.core.relational import Relational

from megatron_grpo.config.errors import RunError
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
from megatron_grpo.environments.sandbox.kernel import die_with_parent

# Limits count the time on a processor: on a loaded machine an answer waits for its turn, and is no worse for that.
ANSWER_CPU_S = 5  # for parsing one answer, and again for each comparison; an answer that takes longer is wrong
PROCESS_CPU_S = 20  # for an answer whose computation cannot be interrupted; then the kernel ends the process
VERIFY_TIMEOUT_S = 300.0  # seconds until a process that no longer runs is killed
STARTUP_TIMEOUT_S = 120.0  # for the process to import math-verify
MEMORY_BYTES = 4 * 2**30  # most that the process may grow after its start; an answer that needs more is wrong
TAIL_CHARACTERS = 2000  # length of a response's end in which the answer is searched without a box

T = TypeVar("T")
_TINY, _TINY_TOLERANCE = 1e-3, 1e-3  # least number that 6 decimals show well, and relative tolerance below it

_BOX = "\\boxed{"
# A blank between two letters or digits: "2 1/2" is not "21/2", and "1 2 3" not "123".
_NEEDED_BLANK = re.compile(r"(?<=[\w.,])\s+(?=[\w.,])")
_LEAD = re.compile(r"(?:(?:so|thus|therefore|hence),? )?(?:the )?(?:final )?answer(?: is)?:? *", re.IGNORECASE)
_READY = b"r"

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for every answer it cannot read


def is_correct(response: str, answer: str) -> bool:
    """Compare the response's final answer with the reference answer by value.

    Main thread only: its time is limited with SIGPROF, which Python delivers there. `answer` is a number, expression
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
    signal.signal(signal.SIGPROF, _end_computation)
    signal.setitimer(signal.ITIMER_PROF, ANSWER_CPU_S, ANSWER_CPU_S)
    try:
        return function()
    except TimeoutException:  # outside of the computations of which math-verify catches it
        return late
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _end_computation(*_: object) -> None:
    raise TimeoutException


class Verifier:
    """A process that compares answers; not safe for several threads."""

    def __init__(self, timeout_s: float = VERIFY_TIMEOUT_S, cpu_s: int = PROCESS_CPU_S) -> None:
        self._timeout_s, self._cpu_s = timeout_s, cpu_s
        self._start()

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Call `is_correct` in the process for (response, reference answer) pairs.

        An answer on which the process hangs or dies is wrong. RunError if the process does not start.
        """
        results: list[bool] = []
        for pair in pairs:
            try:
                self._connection.sendall(json.dumps(pair).encode() + b"\n")
                answer = self._connection.recv(1)
            except OSError:  # a timeout, or a closed connection
                answer = b""
            if not answer:
                self._end()
                self._start()
            results.append(answer == b"1")
        return results

    def _start(self) -> None:
        self._connection, process_end = socket.socketpair()
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main({self._cpu_s})"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
        with process_end:
            pipe = process_end.fileno()
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        self._end = weakref.finalize(self, _end, process, self._connection)
        self._connection.settimeout(STARTUP_TIMEOUT_S)
        try:
            ready = self._connection.recv(1)
        except OSError:
            ready = b""
        if ready != _READY:
            self._end()
            raise RunError(f"the process that compares answers did not start within {STARTUP_TIMEOUT_S:g} s")
        self._connection.settimeout(self._timeout_s)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    process.kill()
    process.wait()
    connection.close()


def main(cpu_s: int) -> None:
    """Answer each line of standard input, JSON [response, answer], with one byte."""
    die_with_parent(9)
    answers = os.dup(1)
    os.dup2(2, 1)  # standard output goes to standard error, so that it is not read as answers
    # A first comparison loads the parsers and sympy, so that loading does not count in an answer's time limit.
    verify(parse("\\boxed{\\frac{1}{2}}", parsing_timeout=0), parse("$0.5$", parsing_timeout=0), timeout_seconds=0)
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    os.write(answers, _READY)
    for line in sys.stdin.buffer:
        response, answer = json.loads(line)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + cpu_s, resource.RLIM_INFINITY))
        try:
            is_right = is_correct(response, answer)
        except (MemoryError, RecursionError):
            is_right = False
        os.write(answers, b"1" if is_right else b"0")
