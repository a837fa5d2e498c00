"""Answers that no response can equal, held against the environments that compare."""

import json
import math
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.rows import examine_set, find_answer_problem
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.math_answers import is_correct
from megatron_grpo.environments.tasks import AdditionEnvironment


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("1/2", "\\boxed{0.5}"),
        (2.0, "\\boxed{2}"),
        (3, "\\boxed{3}"),
        (0.25, "\\boxed{\\frac14}"),
        ("(1, 2)", "\\boxed{(1,2)}"),
        ("yes", "\\boxed{yes}"),
    ],
)
def test_mathematical_answers_that_can_be_right(answer: Any, response: str) -> None:
    assert find_answer_problem("math", answer) is None
    assert is_correct(response, str(answer))


@pytest.mark.parametrize("answer", [[1, 2], {"a": 1}, True, False, "", "  ", math.nan, math.inf, 1e200, 1e-99])
def test_mathematical_answers_that_never_are(answer: Any) -> None:
    assert find_answer_problem("math", answer)


def test_a_number_that_is_written_with_an_exponent_is_its_value() -> None:
    for answer, response in ((1e22, "10^{22}"), (1e-7, "0.0000001"), (1.5e16, "15000000000000000")):
        assert find_answer_problem("math", answer) is None
        assert is_correct(f"\\boxed{{{response}}}", str(answer))
    assert not is_correct("\\boxed{10^{200}}", str(1e200)), "the reason why it is refused"


@pytest.mark.parametrize(
    ("answer", "readable"),
    [
        *(
            (text, True)
            for text in ("50%", "½", "x²", "1.234.567", "12 cm²", "√2", "[0, ∞)", "\\frac{1}{2}", "C", "Monday")
        ),
        *((text, True) for text in ("٤٢", "\\{1, 2\\}", "#5", "90°", "−3", "3:4", "\\text{east}", "x \\in [1, 2)")),
        *((text, False) for text in ("\\frac{1}{2", "1}", "東京", "?", "5 ☺", "2\n3")),
        *((text, False) for text in ("Therefore, the answer is: 180", "Final answer: 42", "all numbers except 3")),
        *((text, True) for text in ("The value is $5$.", "It is \\boxed{5}", "12 red apples", "30 miles per hour")),
        *((text, True) for text in ("x = 5 or x = 7", "1, 2, and 3", "no solution", "\\text{June the 5th}")),
    ],
)
def test_answers_that_cannot_be_read_are_remarked_upon(tmp_path: Path, answer: str, readable: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "7"}) + "\n" + json.dumps({"prompt": "b", "answer": answer}))
    report = examine_set(DatasetConfig(path=str(path)), DataConfig(), {"math": "math"})
    assert report.problems == []
    texts = [remark.text for remark in report.remarks]
    if readable:
        assert texts == []
    else:
        (text,) = texts
        assert text.startswith("has 1 rows, of 2, whose answer cannot be read as mathematics")
        assert f"{path}:2" in text
    assert is_correct(f"\\boxed{{{answer}}}", answer), "the same text is right, read or not"


@pytest.mark.parametrize("answer", ["Therefore, the answer is: 180", "Final answer: 180", "We find that x is 180"])
def test_a_sentence_as_the_answer_equals_no_number(answer: str) -> None:
    """So it is remarked upon: all rewards of such a row are 0."""
    assert not is_correct("The answer is \\boxed{180}.", answer)
    assert not is_correct("\\boxed{18}", answer)


@pytest.mark.parametrize(("left_form", "right_form"), [("cafe\u0301", "caf\u00e9"), ("\u1112\u1161\u11ab", "\ud55c")])
def test_answers_that_look_the_same_are_equal(left_form: str, right_form: str) -> None:
    """A tokenizer that normalises texts gives one form, and a data set may have the other."""
    assert unicodedata.normalize("NFC", left_form) == right_form
    for answer, response in ((left_form, right_form), (right_form, left_form)):
        assert is_correct(f"\\boxed{{{response}}}", answer)


@pytest.mark.parametrize(("answer", "usable"), [("095", True), (117, True), (95.0, False), ("9 5", False), ("", False)])
def test_sums_are_digits(answer: Any, usable: bool) -> None:
    assert (find_answer_problem("addition", answer) is None) == usable
    request = EnvironmentRequest(
        prompt="",
        response="".join(filter(str.isdigit, str(answer))),
        stop_reason="stop",
        extra_env_info={REFERENCE: str(answer)},
    )
    if usable:
        assert AdditionEnvironment().score([request])[0].correct


@pytest.mark.parametrize("answer", [-3, True, None, [9], "²", "１２"])
def test_what_is_no_sum(answer: Any) -> None:
    assert find_answer_problem("addition", answer)


def test_brackets_without_end_are_no_tests() -> None:
    assert "is not JSON that can be read" in str(find_answer_problem("code", "[" * 100_000))


def test_reward_functions_get_whatever_there_is() -> None:
    assert find_answer_problem("reward_functions", [1, {"a": math.nan}]) is None
