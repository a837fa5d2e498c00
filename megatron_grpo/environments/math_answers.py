"""Compares mathematical answers by value with math-verify, in a process that is killed when it hangs."""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import IO, Any

from math_verify import parse, verify

from megatron_grpo.config.errors import RunError

ANSWER_TIMEOUT_S = 5
"""Seconds for reading one answer, and again for comparing it; an answer that takes longer counts as wrong."""

TAIL_CHARACTERS = 2000
"""Without a box, the answer is looked for in this much text at the end of the response."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for every answer it cannot read


def load_parsers() -> None:
    """Load the parsers and sympy, as a first comparison does, so that no answer's time limit includes it."""
    verify(parse("\\boxed{\\frac{1}{2}}", parsing_timeout=0), parse("$0.5$", parsing_timeout=0), timeout_seconds=0)


def is_correct(response: str, answer: str) -> bool:
    """Whether the response's final answer equals the reference in value.

    Main thread only: math-verify limits its time with SIGALRM, which Python delivers there.

    Args:
        response: text of the model.
        answer: the reference: a number, expression or LaTeX, without a box. One that math-verify cannot read is
            compared as text.
    """
    return _equal(final_answer(response), answer)


@lru_cache(maxsize=1024)
def _equal(final: str, answer: str) -> bool:
    # Cached: samples of a group often agree. parse and verify turn errors of sympy and timeouts into "no".
    content = final.removeprefix("\\boxed{").removesuffix("}") if final.startswith("\\boxed{") else final
    if answer.strip() in (content.strip(), final.strip()):
        return True  # the usual case of a right answer
    given = parse(final, parsing_timeout=ANSWER_TIMEOUT_S)
    return bool(verify(_parse_reference(answer), given, timeout_seconds=ANSWER_TIMEOUT_S))


def final_answer(response: str) -> str:
    """The last complete \\boxed{...} of a response, with nested braces; without one, the end of the response."""
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


HANGS_AFTER_S = 20.0
"""Seconds without an answer after which the process is killed; math-verify's own limits end after 15."""

STARTS_WITHIN_S = 120.0
"""Seconds for the process to import math-verify."""

MEMORY_BYTES = 4 * 2**30
"""Memory of the process beyond what it has when it is ready; an answer that needs more counts as wrong."""

_READY = b"r"
_PIECE = 65536


class Verifier:
    """One process that compares answers. Not for several threads at a time."""

    def __init__(self, hangs_after_s: float = HANGS_AFTER_S) -> None:
        """
        Args:
            hangs_after_s: seconds without an answer after which the process is killed.
        """
        self._hangs_after_s = hangs_after_s
        self._process = self._start()

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the final answer of each response equals its reference in value.

        Args:
            pairs: response, any text, and reference, as `is_correct` takes them.

        Raises:
            RunError: the process does not start.
        """
        right: list[bool] = []
        while len(right) < len(pairs):
            right += self._answers(pairs[len(right) :])
        return right

    def _answers(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Answers to the pairs, up to the first one over which the process hung or ended, which counts as wrong."""
        asking, answering = _fd(self._process.stdin), _fd(self._process.stdout)
        unsent = memoryview(b"".join(json.dumps(pair).encode() + b"\n" for pair in pairs))
        right: list[bool] = []
        deadline = time.monotonic() + self._hangs_after_s
        while len(right) < len(pairs):
            left = max(deadline - time.monotonic(), 0.0)
            readable, writable, _ = select.select([answering], [asking] if unsent else [], [], left)
            if writable:
                unsent = unsent[_written(asking, unsent[:_PIECE]) :]
            answer = os.read(answering, _PIECE) if readable else b""
            if answer:
                right += [one == ord("1") for one in answer]
                deadline = time.monotonic() + self._hangs_after_s
            elif readable or time.monotonic() >= deadline:
                _end(self._process)
                self._process = self._start()
                right.append(False)
                break
        return right

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        weakref.finalize(self, _end, process)
        os.set_blocking(_fd(process.stdin), False)
        ready, _, _ = select.select([_fd(process.stdout)], [], [], STARTS_WITHIN_S)
        if not ready or os.read(_fd(process.stdout), 1) != _READY:
            _end(process)
            raise RunError(f"the process that compares answers did not start within {STARTS_WITHIN_S:g} s")
        return process


def _fd(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    return pipe.fileno()


def _written(fd: int, data: memoryview) -> int:
    """Bytes that a pipe accepts; all of them when its reader has ended, which the other pipe reports."""
    try:
        return os.write(fd, data)
    except BrokenPipeError:
        return len(data)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def main() -> None:
    """The process: answers each line on standard input, a JSON list of response and reference, with one character."""
    from megatron_grpo.environments.math_answers import is_correct, load_parsers
    from megatron_grpo.environments.sandbox.kernel import die_with_parent

    die_with_parent(9)
    answers = os.dup(1)
    os.dup2(2, 1)  # other output must not be read as answers
    load_parsers()
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
