"""Scoring of responses: mathematical answers by value, additions by text."""

import gc
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parser

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments import math_answers
from megatron_grpo.environments.math_answers import Verifier, find_final_answer, is_correct
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.sandbox.kernel import list_descendants
from megatron_grpo.environments.tasks import AdditionEnvironment, MathEnvironment

ENDLESS = "\\boxed{9^{9^{9^{9}}}}"  # has more digits than there are atoms
EXTRACT = parser.extract_target_from_pred


def request(response: str, answer: str) -> EnvironmentRequest:
    return EnvironmentRequest(prompt="", response=response, stop_reason="stop", extra_env_info={REFERENCE: answer})


@pytest.fixture(scope="module")
def environment() -> MathEnvironment:
    return MathEnvironment()


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        ("So the sum is \\boxed{0.5}", "1/2", True),
        ("\\boxed{\\frac{2}{4}}", "1/2", True),
        ("therefore $\\frac12$", "1/2", True),
        ("\\boxed{1,000}", "1000", True),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", True),
        ("First \\boxed{3}, no: \\boxed{4}", "4", True),
        ("First \\boxed{3}, no: \\boxed{4}", "3", False),
        ("The answer is 18.", "18", True),
        ("The answer is 17.", "18", False),
        ("\\boxed{\\text{no idea}}", "18", False),
        ("", "18", False),
        ("\\boxed{18", "19", False),
        ("so \\boxed {18}", "18", True),
        ("\\boxed{17}, no, \\fbox{18}", "18", True),
    ],
)
def test_answers_are_compared_by_value(environment: MathEnvironment, response: str, answer: str, correct: bool) -> None:
    (result,) = environment.score([request(response, answer)])
    assert result.correct is correct
    assert result.reward == float(correct)


def test_a_box_that_holds_the_reference_is_right_without_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answers, "parse", lambda *_, **__: pytest.fail("it was read"))
    assert is_correct("so \\boxed{ \\frac{1}{\\sqrt{3}} }", "\\frac{1}{\\sqrt{3}}")
    assert is_correct("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}")


def test_the_last_complete_box_is_the_answer() -> None:
    assert find_final_answer("a \\boxed{1} b \\boxed{\\frac{1}{2}} c") == "\\boxed{\\frac{1}{2}}"
    assert find_final_answer("x" * 5000 + "42").endswith("x42")
    assert len(find_final_answer("x" * 5000)) == math_answers.TAIL_CHARACTERS


@settings(max_examples=60)
@given(response=st.text(alphabet=st.sampled_from("\\{}$^_()[]+-*/=<>!.,0123456789xyzboxedfrac "), max_size=60))
def test_no_response_raises(environment: MathEnvironment, response: str) -> None:
    environment.score([request(response, "7"), request(f"\\boxed{{{response}}}", "7")])


def test_an_answer_that_takes_too_long_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answers, "ANSWER_CPU_S", 1)
    assert not is_correct(ENDLESS, "3")


def test_an_answer_that_waits_for_a_processor_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_and_extract(*arguments: Any, **named: Any) -> Any:
        time.sleep(1.5)
        return EXTRACT(*arguments, **named)

    monkeypatch.setattr(math_answers, "ANSWER_CPU_S", 1)
    monkeypatch.setattr(parser, "extract_target_from_pred", wait_and_extract)
    assert is_correct("\\boxed{\\frac{3}{24}}", "0.125")


def test_a_computation_that_cannot_be_interrupted_ends_with_its_process() -> None:
    assert Verifier(cpu_s=1).verify([(ENDLESS, "3"), ("\\boxed{1}", "1")]) == [False, True]


def test_the_end_of_the_process_makes_one_answer_wrong() -> None:
    before = set(list_descendants(os.getpid()))
    verifier = Verifier()
    (first,) = set(list_descendants(os.getpid())) - before
    assert verifier.verify([("\\boxed{1}", "1")]) == [True]
    (process,) = set(list_descendants(os.getpid())) - before - {first}
    os.kill(process, signal.SIGSTOP)  # so that it cannot be found idle and ended
    threading.Timer(1.0, os.kill, (process, signal.SIGKILL)).start()
    assert verifier.verify([("\\boxed{1}", "1"), ("\\boxed{2}", "1"), ("\\boxed{1}", "1")]) == [False, False, True]
    assert process not in list_descendants(os.getpid())
    del verifier
    gc.collect()
    assert set(list_descendants(os.getpid())) == before


def test_more_answers_than_pipes_hold_are_compared_in_order() -> None:
    pairs = [(f"{' ' * 1500}\\boxed{{{number % 3}}}", "1") for number in range(2000)]
    assert Verifier().verify(pairs) == [number % 3 == 1 for number in range(2000)]
    assert Verifier().verify([]) == []


def test_a_process_that_does_not_start_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(RunError, match="the process that reads texts did not start"):
        Verifier()


def test_additions_are_compared_digit_by_digit() -> None:
    responses = ["095", "95", " 095", "0950", "096", ""]
    results = AdditionEnvironment().score([request(response, "095") for response in responses])
    assert [result.correct for result in results] == [True, False, False, False, False, False]
    assert [result.reward for result in results] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_an_unknown_environment_is_an_error() -> None:
    with pytest.raises(RunError, match="cannot be imported"):
        create_environment(replace(EnvironmentConfig(), type="chess"))
