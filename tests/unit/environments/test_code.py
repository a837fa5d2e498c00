"""Programs are judged by their tests, whatever they try."""

import json
from typing import Any

import pytest

from megatron_grpo.config.data_schema import SandboxConfig
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.code_tests import parse_code_tests
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.rows import find_answer_problem
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments import code
from megatron_grpo.environments.code import CodeEnvironment
from megatron_grpo.environments.code_blocks import extract_program
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.sandbox.sandbox import ProgramResult, Sandbox

SETTINGS = EnvironmentSettings(sandbox=SandboxConfig(required="limits", wall_time_s=3, memory_mb=256))
ASSERTS = ["assert double(2) == 4", "assert double(0) == 0", "assert double(-3) == -6"]
CASES = [{"input": "1 2", "output": "3\n"}, {"input": "5 5", "output": "10"}]


@pytest.fixture(scope="module")
def environment() -> CodeEnvironment:
    environment = create_environment(EnvironmentConfig(type="code", options={"reward": "share"}), SETTINGS)
    assert isinstance(environment, CodeEnvironment)
    return environment


def request(response: str, answer: Any) -> EnvironmentRequest:
    extra = {"answer": answer, REFERENCE: str(answer)}
    return EnvironmentRequest(prompt="", response=response, stop_reason="stop", extra_env_info=extra)


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def double(x): return 2 * x", 1.0),
        ("def double(x): return x * x", 2 / 3),
        ("def double(x): return 0 if x == 0 else 1 / 0", 1 / 3),
        ("def double(x): return 'no'", 0.0),
        ("def double(x) return 2 * x", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 0.0),
        ("while True: pass", 0.0),
        ("def double(x):\n    while x: pass\n    return 0", 0.0),
        ("print('passed 3')\nraise SystemExit", 0.0),
        ("class Same:\n  def __eq__(self, other): return False\ndef double(x): return Same()", 0.0),
    ],
)
def test_asserts(environment: CodeEnvironment, program: str, reward: float) -> None:
    (result,) = environment.score([request(f"Here:\n```python\n{program}\n```\nDone.", ASSERTS)])
    assert result.reward == pytest.approx(reward)
    assert result.correct is (reward == 1.0)


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        ("print(3)", 0.5),
        ("print(sum(map(int, input().split())), end='   ')", 1.0),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", 0.0),
        ("print('x' * 10**9)", 0.0),
    ],
)
def test_cases_of_input_and_output(environment: CodeEnvironment, program: str, reward: float) -> None:
    (result,) = environment.score([request(program, CASES)])
    assert result.reward == reward


def test_all_or_nothing_and_the_order_of_the_samples() -> None:
    environment = CodeEnvironment(SETTINGS, programs_at_once=3)
    programs = ["def double(x): return 2 * x", "def double(x): return x * x", "?", "def double(x): return x + x"]
    results = environment.score([request(program, ASSERTS) for program in programs])
    assert [result.reward for result in results] == [1.0, 0.0, 0.0, 1.0]


def test_a_program_that_fails_a_case_is_not_asked_about_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless one would take all of its time in each, and the environment's deadline would pass."""
    inputs: list[str] = []

    def finished(sandbox: Sandbox, source: str, base_overrides: str = "") -> ProgramResult:
        inputs.append(base_overrides)
        return ProgramResult(ending="exited", exit_code=int(base_overrides == "b"), stdout="", stderr="", seconds=0.0)

    monkeypatch.setattr(Sandbox, "run_python", finished)
    monkeypatch.setattr(EnvironmentSettings, "open_sandbox", lambda settings: Sandbox(settings.sandbox))
    cases = [{"input": letter, "output": ""} for letter in "abcd"]
    assert [letter.reward for letter in CodeEnvironment(SETTINGS).score([request("", cases)])] == [0.0]
    assert inputs == ["a", "b"]
    inputs.clear()
    assert [letter.reward for letter in CodeEnvironment(SETTINGS, reward="share").score([request("", cases)])] == [0.75]
    assert inputs == ["a", "b", "c", "d"]


def test_the_last_block_is_the_program() -> None:
    assert extract_program("```py\na\n```\n```\nb\n```") == "a\n"
    assert extract_program("a = 1") == "a = 1"


def test_forms_of_tests() -> None:
    assert parse_code_tests("assert a") == ["assert a"]
    assert parse_code_tests(json.dumps(ASSERTS)) == parse_code_tests(ASSERTS) == ASSERTS
    apps = {"inputs": ["1 2", "5 5"], "outputs": ["3\n", "10"]}
    assert (
        parse_code_tests(apps)
        == parse_code_tests(json.dumps(apps))
        == parse_code_tests(CASES)
        == [("1 2", "3\n"), ("5 5", "10")]
    )
    for wrong in ([], {}, 3, [3], {"inputs": []}, "", "  "):
        assert find_answer_problem("code", wrong) is not None, wrong
    for right in (ASSERTS, CASES, apps, json.dumps(apps), "assert a"):
        assert find_answer_problem("code", right) is None
    with pytest.raises(ValueError, match="neither Python tests nor cases"):
        parse_code_tests([3])


@pytest.mark.parametrize("call", ["sys.settrace(f)", "sys.monitoring.register_callback(3, 1, f)", "sys._getframe(1)"])
def test_programs_that_watch_the_interpreter_are_recognised(call: str) -> None:
    """sys.monitoring came with Python 3.12."""
    assert code._HARNESS.search(f"import sys\n{call}\n")
    assert not code._HARNESS.search("def monitoring(settings): return settings\n")
