"""Tests of released sets of programs: functions by name, lists of lines, rounded numbers, long integers."""

import json
from typing import Any

import pytest

from megatron_grpo.config.data_schema import SandboxConfig
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.code_tests import parse_code_tests
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.rows import find_answer_problem
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.code import has_same_output
from megatron_grpo.environments.interface import Environment, EnvironmentSettings
from megatron_grpo.environments.registry import create_environment

SETTINGS = EnvironmentSettings(sandbox=SandboxConfig(required="limits", wall_time_s=5, memory_mb=256))
ADD, METHOD = "def add(a, b):\n    return a + b", "class Solution:\n    def add(self, a, b):\n        return a + b"
WRONG = "def add(a, b):\n    return a - b"
LIVE = "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()"
APPS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
TACO = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
LIVE_CODE_BENCH = [
    {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}},
    {"input": "[1]\n[2]", "output": "[1, 2]", "testtype": "functional", "metadata": {"func_name": "add"}},
]


@pytest.fixture(scope="module")
def environment() -> Environment:
    return create_environment(EnvironmentConfig(type="code"), SETTINGS)


def reward(environment: Environment, program: str, answer: Any) -> float | None:
    text = json.dumps(answer)
    extra = {"answer": text, REFERENCE: text}
    response = f"```python\n{program}\n```"
    assert find_answer_problem("code", text) is None
    request = EnvironmentRequest(prompt="", response=response, stop_reason="stop", extra_env_info=extra)
    return environment.score([request])[0].reward


@pytest.mark.parametrize("answer", [APPS, TACO, LIVE_CODE_BENCH], ids=["apps", "taco", "livecodebench"])
@pytest.mark.parametrize(("program", "expected"), [(ADD, 1.0), (METHOD, 1.0), (WRONG, 0.0), (LIVE, 0.0)])
def test_cases_that_name_a_function_call_it(
    environment: Environment, program: str, expected: float, answer: Any
) -> None:
    assert reward(environment, program, answer) == expected


@pytest.mark.parametrize(
    ("returned", "output", "expected"),
    [
        ("(1, 2)", [1, 2], 1.0),
        ("[[0.1 + 0.2], 1]", [[0.3], 1.0], 1.0),
        ("[0.31]", [0.3], 0.0),
        ("[1, 2, 3]", [1, 2], 0.0),
        ("10**9 + 7", 10**9 + 8, 0.0),
        ("None", None, 1.0),
    ],
)
def test_values_of_json_are_equal_to_those_of_python(
    environment: Environment, returned: str, output: Any, expected: float
) -> None:
    program = f"def f():\n    return {returned}"
    assert reward(environment, program, {"fn_name": "f", "inputs": [[]], "outputs": [output]}) == expected


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([{"input": "1\n2", "output": "3", "testtype": "functional"}], "name it in each, as fn_name"),
        ({"inputs": [[1, 2]], "outputs": [3]}, "as input or output of a program"),
        ({"fn_name": "a b", "inputs": [[1]], "outputs": [1]}, "is no name"),
        ({"fn_name": "add", "inputs": [3], "outputs": [1]}, "no list of arguments"),
    ],
)
def test_cases_of_an_unknown_function_are_refused(answer: Any, problem: str) -> None:
    assert problem in str(find_answer_problem("code", json.dumps(answer)))


def test_lists_of_lines_are_the_input_and_output_of_a_program() -> None:
    assert parse_code_tests({"inputs": [["1", "2"], "3"], "outputs": [["3", "4"], 5]}) == [("1\n2", "3\n4"), ("3", "5")]


@pytest.mark.parametrize(
    "program",
    ["print(10**5000)", "print('1' + '0' * 5000)", "print(int('1' + '0' * 5000))"],
    ids=["written", "as text", "read"],
)
def test_integers_of_any_length_are_read_and_written(environment: Environment, program: str) -> None:
    assert reward(environment, program, [{"input": "", "output": "1" + "0" * 5000}]) == 1.0


def test_functions_return_integers_of_any_length(environment: Environment) -> None:
    cases = {"fn_name": "f", "inputs": [[]], "outputs": ["1" + "0" * 5000]}
    assert reward(environment, "def f():\n    return str(10**5000)", cases) == 1.0


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        ("0.333333", "0.333333333333", True),
        ("0.30000000000000004 2", "0.3 2", True),
        ("2.50", "2.5", True),
        ("1e9", "1000000000.0", True),
        ("3", "3.0", True),
        ("x = 0.5000001", "x = 0.5", True),
        ("0.33", "0.333333333333", False),
        ("0.5001", "0.5", False),
        ("1000000007", "1000000008", False),
        ("3.0", "3", False),
        ("0.5  1", "0.5 1", False),
        ("0.5\n0.5", "0.5", False),
        ("nan", "0.5", False),
        ("1e999", "0.5", False),
    ],
)
def test_expected_numbers_with_decimals_may_be_rounded(output: str, expected: str, is_same: bool) -> None:
    assert has_same_output(output, expected) is is_same
