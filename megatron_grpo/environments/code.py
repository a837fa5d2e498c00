"""The `code` environment: runs programs that the model wrote against tests in the sandbox."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Literal

from megatron_grpo.config.section import Positive
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.rows import code_tests
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment, EnvironmentSettings
from megatron_grpo.environments.sandbox.sandbox import Sandbox

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

# The mark is read before the program runs and printed after all tests, so a program that exits early passes no test.
_HARNESS = """
import os, sys
def _judge(program, tests):
    mark, report = sys.stdin.readline(), os.dup(1)
    names = {"__name__": "__main__"}
    passed = 0
    try:
        exec(compile(program, "program.py", "exec"), names)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        tests = []
    for test in tests:
        try:
            exec(compile(test, "test.py", "exec"), names)
            passed += 1
        except BaseException as error:
            print(f"{test}: {type(error).__name__}: {error}", file=sys.stderr)
    sys.stdout.flush()
    os.write(report, f"\\n{mark.strip()} {passed}\\n".encode())
    os._exit(0)
"""


class CodeEnvironment(Environment):
    """Reward for a program that passes its row's tests: the last fenced block of the response, or all of it.

    The answer column holds Python tests, as one text or a list of texts, each of which passes when it does not raise;
    or cases of input and output: a list of {"input", "output"}, or {"inputs": [...], "outputs": [...]}. JSON text of
    any of these is accepted. Outputs are compared line by line without trailing blanks. Python tests run in the
    program's process, so it can read them; expected outputs never enter the sandbox.

    Args:
        settings: settings of the run, among them the sandbox.
        reward: "all": 1 when every test passes, else 0; "share": the share of tests that pass.
        programs_at_once: programs that one environment process runs concurrently.
    """

    def __init__(
        self, settings: EnvironmentSettings, reward: Literal["all", "share"] = "all", programs_at_once: Positive = 2
    ) -> None:
        self._sandbox = settings.open_sandbox()
        self._share = reward == "share"
        self._pool = ThreadPoolExecutor(programs_at_once)

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return list(self._pool.map(self._score, requests))

    def _score(self, request: EnvironmentRequest) -> EnvironmentReturn:
        tests = code_tests(request.extra_env_info.get("answer", request.extra_env_info[REFERENCE]))
        share = passed(self._sandbox, program_of(request.response), tests, every=self._share) / len(tests)
        return EnvironmentReturn(reward=share if self._share else float(share == 1.0), correct=share == 1.0)


def program_of(response: str) -> str:
    """The last fenced block of a response, or the whole response without one."""
    blocks = _BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def passed(sandbox: Sandbox, program: str, tests: Sequence[str | tuple[str, str]], *, every: bool) -> int:
    """Count the tests that a Python program passes: statements that do not raise after it, and (input, output) pairs.

    `every`: whether to continue after a failed pair; an endless program uses its whole time limit in each.
    """
    statements = [test for test in tests if isinstance(test, str)]
    cases = [test for test in tests if not isinstance(test, str)]
    outcomes = (_gives(sandbox, program, *case) for case in cases)
    count = sum(outcomes if every else takewhile(bool, outcomes))
    if statements and (every or count == len(cases)):
        mark = secrets.token_hex(16)
        source = f"{_HARNESS}\n_judge({program!r}, {statements!r})\n"
        last = sandbox.run_python(source, f"{mark}\n").stdout.rstrip().rpartition("\n")[2].split(" ")
        count += int(last[1]) if last[0] == mark and len(last) == 2 else 0
    return count


def _gives(sandbox: Sandbox, program: str, given: str, expected: str) -> bool:
    finished = sandbox.run_python(program, given)
    return finished.succeeded and _lines(finished.stdout) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
