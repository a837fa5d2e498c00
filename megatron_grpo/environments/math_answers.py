"""Compares mathematical answers by value with math-verify, in a process that is killed when it hangs."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import unicodedata
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.math_text import AnswerText, rewrite_answer, rewrite_tail, same_words
from megatron_grpo.environments.sandbox.kernel import die_with_parent

ANSWER_TIMEOUT_S = 5
"""Seconds for reading one answer, and again for comparing it; an answer that takes longer counts as wrong."""

_BOX = "\\boxed{"
_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
TAIL_CHARACTERS = 2000
"""Characters at the end of a response in which the answer is searched if there is no box."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for every answer it cannot read


def is_correct(response: str, answer: str) -> bool:
    """Whether the response's final answer equals the reference answer in value.

    Main thread only: math-verify limits its time with SIGALRM, which Python delivers there.

    Args:
        response: text of the model.
        answer: the reference answer: a number, expression or LaTeX, without a box. Both are brought to one form first
            (`data.math_text`). An answer that math-verify cannot read is compared as text.
    """
    return _equal(find_final_answer(response), answer)


@lru_cache(maxsize=1024)
def _equal(final: str, answer: str) -> bool:
    # Cached, because samples of a group often agree. parse and verify treat sympy's errors and timeouts as "not equal".
    is_boxed = final.startswith(_BOX)
    content = final.removeprefix(_BOX).removesuffix("}") if is_boxed else final
    if _squeezed(answer) in (_squeezed(content), _squeezed(final)):
        return True  # most correct answers
    expected, actual = rewrite_answer(answer), rewrite_answer(content) if is_boxed else rewrite_tail(content)
    if is_boxed and (same_words(answer, content) or expected == actual):
        return True
    if None not in (expected.unit, actual.unit) and expected.unit != actual.unit:
        return False
    return any(_equal_values(*pair, is_boxed) for pair in _readings(expected, actual, is_boxed))


def _readings(expected: AnswerText, actual: AnswerText, is_boxed: bool) -> Iterator[tuple[str, str]]:
    """Pairs of texts of which one must be equal in value.

    Only where one of the answers has a percent sign, the other may be the percentage or the share. In a text without
    a box, percent signs beside the answer count for nothing.
    """
    actual_has_percent = actual.has_percent
    if actual_has_percent and not is_boxed:
        first, second = (_parse(text) for text in (actual.text, actual.as_share))
        actual_has_percent = first != second
    yield expected.text, actual.text
    if expected.has_percent and not actual_has_percent:
        yield expected.as_share, actual.text
    if actual_has_percent and not expected.has_percent:
        yield expected.text, actual.as_share


def _equal_values(expected: str, actual: str, is_boxed: bool) -> bool:
    values = _parse(f"{_BOX}{actual}}}" if is_boxed else actual)
    return bool(verify(_parse_reference(expected), values, timeout_seconds=ANSWER_TIMEOUT_S))


def _squeezed(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())


def find_final_answer(response: str) -> str:
    """The last \\boxed{...} of a response, with nested braces.

    If there is no box, or the last one is not closed: the last TAIL_CHARACTERS characters of the response.
    """
    starts = [box.end() for box in _OPENING.finditer(response)]
    if starts:
        depth = 1
        for position in range(starts[-1], len(response)):
            depth += {"{": 1, "}": -1}.get(response[position], 0)
            if depth == 0:
                return _BOX + response[starts[-1] : position + 1]
    return response[-TAIL_CHARACTERS:]


@lru_cache(maxsize=1024)
def _parse(text: str) -> list[Any]:
    # Cached, because all samples of a group share their reference answer.
    return list(parse(text, parsing_timeout=ANSWER_TIMEOUT_S))


def _parse_reference(answer: str) -> list[Any]:
    return _parse(f"{_BOX}{answer}}}")


HANGS_AFTER_S = 20.0
"""Seconds without an answer after which the process is killed; math-verify's own limits add up to 15 s."""

STARTS_WITHIN_S = 120.0
"""Seconds for the process to import math-verify."""

MEMORY_BYTES = 4 * 2**30
"""Bytes of memory that the process may use beyond its size when ready; an answer that needs more counts as wrong."""

_READY = b"r"


class Verifier:
    """A process that compares answers. Not safe for concurrent use by several threads."""

    def __init__(self, hangs_after_s: float = HANGS_AFTER_S) -> None:
        """Start the process, which is killed after hangs_after_s seconds without an answer."""
        self._hangs_after_s = hangs_after_s
        self._start()

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the final answer of each response equals its reference in value.

        Args:
            pairs: (response, reference answer) pairs, the arguments of `is_correct`.

        Raises:
            RunError: the process does not start.
        """
        return [self._verify(pair) for pair in pairs]

    def _verify(self, pair: tuple[str, str]) -> bool:
        """Compare one pair; an answer on which the process hangs or dies counts as wrong."""
        try:
            self._connection.sendall(json.dumps(pair).encode() + b"\n")
            answer = self._connection.recv(1)
        except OSError:  # a timeout, or a closed connection
            answer = b""
        if not answer:
            self._end()
            self._start()
        return answer == b"1"

    def _start(self) -> None:
        self._connection, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
        with theirs:
            pipe = theirs.fileno()
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        self._end = weakref.finalize(self, _end, process, self._connection)
        self._connection.settimeout(STARTS_WITHIN_S)
        try:
            ready = self._connection.recv(1)
        except OSError:
            ready = b""
        if ready != _READY:
            self._end()
            raise RunError(f"the process that compares answers did not start within {STARTS_WITHIN_S:g} s")
        self._connection.settimeout(self._hangs_after_s)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    process.kill()
    process.wait()
    connection.close()


def main() -> None:
    """Run the process: answer each line of standard input, a JSON list [response, answer], with one byte."""
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
        try:
            right = is_correct(response, answer)
        except (MemoryError, RecursionError):
            right = False
        os.write(answers, b"1" if right else b"0")
