"""The `code` environment: programs against tests, in the sandbox."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Literal

from megatron_grpo.config.section import Positive
from megatron_grpo.data.code_tests import TOLERANCE, PreparedTests, parse_code_tests, prepare_tests
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.code_blocks import extract_program
from megatron_grpo.environments.interface import Environment, EnvironmentSettings
from megatron_grpo.environments.sandbox.sandbox import Sandbox

# Expressions with which programs inspect, change or leave the interpreter that runs them.
_HARNESS = re.compile(
    r"_getframe|currentframe|f_back|f_globals|f_locals|tb_frame|inspect\.stack|__globals__|__subclasses__|\bgc\b|/proc\b|"
    r"ptrace|\bctypes\b|settrace|setprofile|sys\.monitoring|sys\.modules|__builtins__|\bbuiltins\b|__main__\.|"
    r"\bos\._exit|\bunittest\b"
)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_DECIMAL = re.compile(r"(?=.*[.eE])" + _NUMBER.pattern)
# Fewest cases with different inputs whose equal outputs are reported as suspect.
_EQUAL_CASES = 3

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Verdict:
    """Results of a row's tests for one program."""

    passed: int = 0  # tests that passed
    tests: int = 0  # all tests
    idle: int = 0  # tests that passed without a request to the program
    equal_outputs: bool = False  # _EQUAL_CASES or more different inputs all gave the same output
    touched: bool = False  # the program inspected the interpreter that ran it, or tried to
    untrusted: list[str] = field(default_factory=list)  # reasons why verdicts of tests cannot be trusted


@dataclass(eq=False)
class CodeEnvironment(Environment):
    """Reward for a program that passes its row's tests.

    The program is the response's last Python block, or the whole response without a block. The answer column holds
    Python tests, as one text or a list of texts, each of which passes when it does not raise; or cases of input and
    output: a list of {"input", "output"}, or {"inputs": [...], "outputs": [...]}, with "fn_name" where inputs are
    arguments of a function. JSON text of any of these is accepted. Outputs are compared line by line without trailing
    blanks, and expected numbers with decimals to 1e-6. Python tests run in a process of their own, which asks the
    program's process for the results of calls; the program's process has neither tests nor expected outputs.
    """

    settings: EnvironmentSettings
    reward: Literal["all", "share"] = "all"
    """all: 1 when every test passes, else 0; share: the share of tests that pass."""
    programs_at_once: Positive = 2
    """Programs that one environment process runs concurrently."""
    untrusted_tests: Literal["refuse", "allow"] = "refuse"
    """What to do with a test that compares live objects of the program, so that the program itself would decide its
    verdict. refuse: it fails; allow: the program's answer counts."""

    def __post_init__(self) -> None:
        self._sandbox, self._pool = self.settings.open_sandbox(), ThreadPoolExecutor(self.programs_at_once)
        self._logged: set[str] = set()  # reasons that were logged, each once

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return list(self._pool.map(self._score, requests))

    def _score(self, request: EnvironmentRequest) -> EnvironmentReturn:
        program = extract_program(request.response)
        tests = parse_code_tests(request.extra_env_info.get("answer", request.extra_env_info[REFERENCE]), program)
        gives_share, trusts_all = self.reward == "share", self.untrusted_tests == "allow"
        verdict = check_program(self._sandbox, program, tests, run_all=gives_share, allow_untrusted=trusts_all)
        for reason in verdict.untrusted:
            if reason not in self._logged:
                self._logged.add(reason)
                verb = "counts, though" if trusts_all else "fails:"
                _log.warning("a test of a program %s it depends on %s", verb, reason)
        share = verdict.passed / verdict.tests if verdict.tests else 0.0
        return EnvironmentReturn(
            reward=share if gives_share else float(share == 1.0),
            correct=share == 1.0,
            metrics={
                "suspect/touched_harness": float(verdict.touched or _HARNESS.search(program) is not None),
                "suspect/idle_tests": verdict.idle / max(verdict.passed, 1),
                "suspect/equal_outputs": float(verdict.equal_outputs),
                "untrusted_tests": float(bool(verdict.untrusted)),
            },
            notes={"untrusted tests": "; ".join(verdict.untrusted)} if verdict.untrusted else {},
        )


def check_program(
    sandbox: Sandbox, program: str, tests: Sequence[str | tuple[str, str]], *, run_all: bool, allow_untrusted: bool
) -> Verdict:
    """Run the tests of a row against a Python program.

    Tests are Python statements, or (input, output) pairs. `run_all`: continue after a failed test; an endless program
    uses its whole time limit in each pair. `allow_untrusted`: count tests whose verdict cannot be trusted.
    """
    texts = tuple(test for test in tests if isinstance(test, str))
    if texts:
        try:
            prepared = prepare_tests(texts)
        except ValueError as error:
            return Verdict(tests=len(texts), untrusted=[f"a text that {error}"])
        return _run_python_tests(sandbox, program, prepared, run_all, allow_untrusted)
    verdict = Verdict(tests=len(tests))
    outputs: dict[str, str] = {}
    for test in tests:
        assert isinstance(test, tuple)
        stdin, expected = test
        result = sandbox.run_python(program, stdin)
        outputs[stdin] = result.stdout
        is_right = result.succeeded and has_same_output(result.stdout, expected)
        verdict.passed += is_right
        if not is_right and not run_all:
            break
    verdict.equal_outputs = len(outputs) >= _EQUAL_CASES and len(set(outputs.values())) == 1
    return verdict


def _run_python_tests(sandbox: Sandbox, program: str, tests: PreparedTests, run_all: bool, trusts_all: bool) -> Verdict:
    result = sandbox.run_tests(program, asdict(tests), run_all=run_all, allow_untrusted=trusts_all)
    verdict, passed = Verdict(tests=tests.test_count), set()
    # A report with one malformed line is discarded as a whole: what wrote that line may have written the others.
    try:
        for line in map(json.loads, result.stdout.splitlines()):
            if isinstance(line, list):
                number, passes, has_requests, untrusted = line
                if tests.tests[number].is_test and passes:
                    passed.add(number)
                    verdict.idle += not has_requests
                verdict.untrusted += [untrusted] if untrusted else []
            else:
                verdict.touched, verdict.equal_outputs = line["touched"], line["equal_outputs"]
    except (ValueError, LookupError, TypeError) as error:
        _log.warning("the report of a program's tests is malformed, so none of its tests counts: %r", error)
        return Verdict(tests=tests.test_count)
    verdict.passed = len(passed)
    return verdict


def has_same_output(output: str, expected: str) -> bool:
    """Compare outputs line by line; expected numbers with decimals may be rounded."""
    lines, expected_lines = _split_lines(output), _split_lines(expected)
    return len(lines) == len(expected_lines) and all(map(_is_same_line, lines, expected_lines))


def _is_same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    words, expected_words = line.split(" "), expected.split(" ")
    return len(words) == len(expected_words) and all(map(_is_same_word, words, expected_words))


def _is_same_word(word: str, expected: str) -> bool:
    # Integers have no tolerance: two large ones may differ by less.
    if word == expected or not (_DECIMAL.fullmatch(expected) and _NUMBER.fullmatch(word)):
        return word == expected
    return abs(float(word) - float(expected)) <= TOLERANCE * max(1.0, abs(float(expected)))


def _split_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
