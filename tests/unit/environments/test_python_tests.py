"""Python tests against honest and hostile programs: each honest one keeps its reward, no hostile one gets any."""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from megatron_grpo.config.data_schema import SandboxConfig
from megatron_grpo.data.code_tests import prepare_tests
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.code import CodeEnvironment, Verdict, check_program
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.sandbox.kernel import list_descendants
from megatron_grpo.environments.sandbox.program_process import ProgramPeer
from megatron_grpo.environments.sandbox.sandbox import ProgramResult, Sandbox
from megatron_grpo.environments.sandbox.values import Memo
from tests.support.python_tests import HONEST, HOSTILE, Honest, Hostile, hostile_tests
from tests.support.sandboxed import STRONGEST, isolated

LIMITS = SandboxConfig(wall_time_s=5, cpu_time_s=2, memory_mb=200)
EQUAL, OBJECTS = hostile_tests("equal"), hostile_tests("objects")
QUICK = {
    "function",
    "in place",
    "callback",
    "class",
    "exception of its own",
    "generator",
    "unittest",
    "check(candidate)",
} | {"frames", "isclose", "equal to everything", "swallowed", "vectors", "os._exit in a call", "parent killed"}
"""Kinds of programs that are run always; all are run as a slow test."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(list_descendants(os.getpid()))
    yield
    assert set(list_descendants(os.getpid())) <= before


def verdict_of(program: str, tests: tuple[str, ...], allow: bool = False, limits: SandboxConfig = LIMITS) -> Verdict:
    return check_program(Sandbox(limits, STRONGEST), program, tests, run_all=True, allow_untrusted=allow)


def params(programs: Sequence[Honest | Hostile]) -> list[Any]:
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(program, id=program.kind, marks=marks[program.kind in QUICK]) for program in programs]


@pytest.mark.parametrize("program", params(HONEST))
def test_an_honest_program_keeps_its_reward_and_a_wrong_one_loses_it(program: Honest) -> None:
    limits = SandboxConfig(wall_time_s=60)
    right = verdict_of(program.program, program.tests, limits=limits)
    assert (right.passed, right.untrusted) == (right.tests, [])
    assert right.tests > 0
    wrong = verdict_of(program.wrong, program.tests, limits=limits)
    assert wrong.passed < wrong.tests


@isolated
@pytest.mark.parametrize("program", params(HOSTILE))
def test_a_hostile_program_gets_nothing_and_leaves_nothing(program: Hostile) -> None:
    result = score_program(program.program, program.tests, reward="share")
    assert (result.reward, result.correct) == (0.0, False)
    assert result.metrics["suspect/touched_harness"] == float(program.touches)


def test_attacks_use_names_that_the_sandbox_has() -> None:
    """A program that looks for a name of long ago fails by itself, and shows nothing."""
    text = "".join(attack.program for attack in HOSTILE)
    peer = ProgramPeer(0, 1)
    accessed = set(re.findall(r"(?:\bpeer\(\)|\bpeer|\bkind|type\(peer\)|\bp)\.(\w+)", text))
    assert accessed >= {"send", "request", "encode", "collect_extras", "_encode_values", "_names", "_writing"}
    assert [name for name in accessed if not hasattr(peer, name)] == []
    assert set(re.findall(r"__name__ == ['\"](\w+)['\"]", text)) == {ProgramPeer.__name__, Memo.__name__}
    assert f'sys.modules["{Memo.__module__}"].{Memo.__name__}' in text


@pytest.mark.parametrize("kind", ["frames", "equal to everything"])
def test_the_attacks_of_the_table_are_real(kind: str) -> None:
    """In one process with its tests, each of these programs passes them."""
    program = next(honest_program.program for honest_program in HOSTILE if honest_program.kind == kind)
    names: dict[str, object] = {}
    exec(program, names)
    text = EQUAL[0]
    exec(f"def run(text):\n    exec(text)\nrun({text!r})", names)


def score_program(program: str, tests: Sequence[Any], **options: Any) -> EnvironmentReturn:
    settings = EnvironmentSettings(sandbox=SandboxConfig(required="limits", wall_time_s=5, cpu_time_s=2, memory_mb=200))
    environment = CodeEnvironment(settings, **options)
    extra = {"answer": list(tests), REFERENCE: ""}
    request = EnvironmentRequest(prompt="", response=program, stop_reason="stop", extra_env_info=extra)
    return environment.score([request])[0]


POINT = (
    "from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n    x: int\n    y: int\n"
    "def f(p): return P(p.y, p.x)"
)
COMPARED = ["assert f(P(1, 2)) == P(2, 1)", "assert P(1, 2) < P(1, 3)", "assert f(P(1, 2)).x == 2"]


def test_tests_that_compare_live_objects_are_refused_or_allowed(caplog: pytest.LogCaptureFixture) -> None:
    refused = score_program(POINT, COMPARED, reward="share")
    assert refused.reward == pytest.approx(1 / 3)
    assert refused.metrics["untrusted_tests"] == 1.0
    assert refused.notes == {"untrusted tests": "__eq__ of a live object; __lt__ of a live object"}
    logged = "a test of a program fails: it depends on __eq__ of a live object"
    assert [record.message for record in caplog.records].count(logged) == 1
    allowed = score_program(POINT, COMPARED, reward="share", untrusted_tests="allow")
    assert (allowed.reward, allowed.metrics["untrusted_tests"]) == (1.0, 1.0)
    wrong = POINT.replace("p.y, p.x", "p.x, p.y")
    assert score_program(wrong, COMPARED, reward="share", untrusted_tests="allow").reward == pytest.approx(1 / 3)


def test_a_test_without_its_own_process_would_see_the_state_of_another() -> None:
    counting = "calls = []\ndef f():\n    calls.append(1)\n    return len(calls)"
    assert verdict_of(counting, ("assert f() == 1", "assert f() == 1")).passed == 2
    assert prepare_tests(("a = f()", "assert a == 1")).needs_one_fork
    assert not prepare_tests(
        ("import math\ndef g(): return f()", "b = g()", "b = f()\nassert math.pi and b == 1")
    ).needs_one_fork
    assert verdict_of(counting, ("a = f()\nassert a == 1", "assert a == 1 and f() == 2")).passed == 2


def test_the_tests_before_an_endless_one_count() -> None:
    program = "def f(x):\n    while x == 3: pass\n    return 2 * x"
    assert verdict_of(program, EQUAL, limits=SandboxConfig(wall_time_s=60, cpu_time_s=1)).passed == 2


def test_suspicious_figures() -> None:
    honest = score_program("def f(x): return 2 * x", EQUAL)
    assert honest.metrics == {
        "suspect/touched_harness": 0.0,
        "suspect/idle_tests": 0.0,
        "suspect/equal_outputs": 0.0,
        "untrusted_tests": 0.0,
    }
    asserts = ["assert f(1)", "assert f(2)", "assert f(3)"]
    assert score_program("def f(x): return True", asserts).metrics["suspect/equal_outputs"] == 1.0
    assert score_program("def f(x): return x", asserts).metrics["suspect/equal_outputs"] == 0.0
    idle = score_program("def f(x): return x", ["assert f(1) == 1", "assert 1 + 1 == 2"])
    assert (idle.reward, idle.metrics["suspect/idle_tests"]) == (1.0, 0.5)
    hidden = "def f(x): return getattr(__import__('g' + 'c'), 'get_' + 'objects')() and 2 * x"
    assert score_program(hidden, EQUAL).metrics["suspect/touched_harness"] == 1.0
    cases = [{"input": str(number), "output": "1"} for number in range(3)]
    assert score_program("print(1)", cases).metrics["suspect/equal_outputs"] == 1.0
    assert score_program("print(int(input()) and 1)", cases).metrics["suspect/equal_outputs"] == 0.0


@pytest.mark.parametrize("line", ['[7,true,true,""]', "[0]", "no JSON", "1", '["0",true,true,""]'])
def test_a_report_of_the_tests_that_makes_no_sense_is_no_pass(
    line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = '[0,true,true,""]'
    program_result = ProgramResult(ending="exited", exit_code=0, stdout=f"{right}\n{line}\n", stderr="", seconds=0.0)
    monkeypatch.setattr(Sandbox, "run_tests", lambda *base_overrides, **options: program_result)
    assert score_program("", EQUAL[:1]).reward == 0.0
    assert "none of its tests counts" in caplog.text


@pytest.mark.parametrize(
    ("tests", "doubt"),
    [
        (["assert P(1) == P(2)"], "compare P(1)"),
        (["import unittest\nclass T(unittest.TestCase):\n  def test(s): s.assertEqual(P(1), f(1))"], "compare P(1)"),
        (["class Q(P): pass\nassert Q().x == f()"], "inherit: class Q from P"),
        (["assert eval(f(1)) == 2"], "call eval()"),
        (["open('a', 'w').write('x')\nassert f('a') == 1"], "call open()"),
        (["assert 1 + 1 == 2"], "use no name of the program"),
    ],
)
def test_what_a_text_says_about_its_trustworthiness(tests: list[str], doubt: str) -> None:
    assert prepare_tests(tuple(tests)).doubts[0].startswith(doubt)


def test_honest_texts_raise_no_doubt() -> None:
    assert {
        honest_program.kind: prepare_tests(honest_program.tests).doubts
        for honest_program in HONEST
        if prepare_tests(honest_program.tests).doubts
    } == {}
    assert prepare_tests(OBJECTS[:1]).doubts


def test_names_that_a_program_may_define_for_its_tests() -> None:
    assert prepare_tests(("assert abs(f(2) - 1) < sqrt(2)",)).names == ("f",)
    assert prepare_tests(("assert abs(f(2) - 1) < sqrt(2)",)).modules == {"sqrt": "math:sqrt"}
    assert prepare_tests(("assert gcd(4, 6) == 2",)).names == ("gcd",)
    assert prepare_tests(("assert sum(1, 2) == 3",)).names == ("sum",)
    assert prepare_tests(("assert isclose(sqrt(2), 1.5)",)).names == ("sqrt",)
    assert prepare_tests(("assert abs(sum(1, 2) - 3) < 1",)).names == ()
    assert prepare_tests(("assert math.isclose(f(1), 2)",)).modules == {"math": "math"}
    assert prepare_tests(("import math\nx = 3\ndef g(y): return [z + x for z in y]\nassert g(f(math.e))",)).names == (
        "f",
    )


def test_definitions_are_no_tests_and_definitions_alone_are_none() -> None:
    tests = prepare_tests(
        ("import math", "def check(g): assert g(1)", "x = 5", "check(f)", "def test_f(): assert f(x)")
    )
    assert [test.is_test for test in tests.tests] == [False, False, False, True, True]
    assert [test.test_names for test in tests.tests] == [(), (), (), (), ("test_f",)]
