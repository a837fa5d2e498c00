"""What results.json makes of scored responses, and of two evaluations of the same prompts, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.evaluation.results import (
    AnsweredSet,
    compare_evaluations,
    compute_set_results,
    find_vote,
    make_sample_row,
)
from tests.support.trajectories import failed_trajectory, make_trajectory


def datum(idx: int) -> DatumSpec:
    rest: dict[str, Any] = {"message_log": [], "length": 1, "loss_multiplier": 1.0, "task_name": "task"}
    return {"extra_env_info": {REFERENCE: str(idx)}, "idx": idx, "prompt": f"prompt {idx}", **rest}


def answered(*marks: str) -> AnsweredSet:
    """Prompts with a response for each letter: r right, w wrong, f failed, ? not judged."""
    made = {
        "r": lambda n: make_trajectory(2, sample=n, correct=True, reward=1.0, response="7"),
        "w": lambda n: make_trajectory(4, sample=n, correct=False, reward=0.0, response=f"no {n}"),
        "f": lambda n: failed_trajectory(sample=n),
        "?": lambda n: make_trajectory(2, sample=n, correct=None, reward=0.5, response="?"),
    }
    found = AnsweredSet([datum(idx) for idx in range(len(marks))], [], [])
    for prompt, letters in zip(found.prompts, marks, strict=True):
        ones = [made[letter](number) for number, letter in enumerate(letters)]
        found.outcomes.append([one.outcome for one in ones])
        found.rows.append([make_sample_row("set", prompt, one) for one in ones])
    return found


def test_figures_of_a_set_by_hand() -> None:
    results = compute_set_results(answered("rrww", "wwww", "rfff", "????"), [1, 4])
    assert results["prompts"] == 4
    assert results["accuracy"]["mean"] == pytest.approx((0.5 + 0 + 1) / 3), "a prompt counts as much as another"
    assert results["reward"]["mean"] == pytest.approx((0.5 + 0 + 1 + 0.5) / 4)
    assert (results["pass@1"]["mean"], results["pass@1"]["prompts"]) == (pytest.approx(0.5), 3)
    assert (results["pass@4"]["mean"], results["pass@4"]["prompts"]) == (0.5, 2), "the third has one judged response"
    assert (results["cons@4"]["mean"], results["cons@4"]["prompts"]) == (0.5, 2), "7 has two votes, the others one"
    assert results["metrics"]["accuracy"] == pytest.approx(3 / 9), "as validation counts: responses"
    interval = results["accuracy"]
    assert 0 <= interval["low"] < interval["mean"] < interval["high"] <= 1


def test_what_nobody_can_judge_has_no_accuracy() -> None:
    results = compute_set_results(answered("??", "?f"), [1])
    assert "accuracy" not in results
    assert "pass@1" not in results
    assert results["reward"]["mean"] == 0.5


@pytest.mark.parametrize(
    ("response", "vote"),
    [
        ("so \\boxed{ \\sqrt{2} }.", "\\sqrt{2}"),
        ("first\n 42 \n", "42"),
        ("we go\nleft  then right", "left then right"),
        ("", None),
        (" \n", None),
    ],
)
def test_votes(response: str, vote: str | None) -> None:
    assert find_vote(response) == vote


@pytest.mark.parametrize(
    ("responses", "vote"),
    [
        (["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", "\\boxed{\\dfrac12}", "it is\n1/2", "Answer: **.50**."], "1/2"),
        (["\\boxed{-1,200}", "\\boxed{-1200.0}", "#### -1200", "The answer is $-1200$."], "-1200"),
        (["\\boxed{(B)}", "\\boxed{B}", "The answer is (B).", "**Answer:** B"], "B"),
        (["\\boxed{(1, 2)}", "\\boxed{(1,2)}"], "(1,2)"),
    ],
)
def test_equal_answers_are_one_vote(responses: list[str], vote: str) -> None:
    assert [find_vote(response) for response in responses] == [vote] * len(responses)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1 2", "12"),
        ("\\boxed{2\\frac{1}{2}}", "\\boxed{21/2}"),
        ("Answer: -3", "Answer: 3"),
        ("\\boxed{1/0}", "\\boxed{1}"),
        ("\\boxed{" + "9" * 5000 + "}", "\\boxed{" + "9" * 5001 + "}"),
        ("\\boxed{(1,2)}", "\\boxed{(2,1)}"),
    ],
)
def test_other_answers_are_other_votes(first: str, second: str) -> None:
    assert find_vote(first) != find_vote(second)


def rows_of(found: AnsweredSet) -> list[dict[str, Any]]:
    return [row for rows in found.rows for row in rows]


def test_a_comparison_pairs_prompts() -> None:
    before, now = rows_of(answered("w", "w", "r", "w", "r")), rows_of(answered("r", "r", "r", "w", "w", "r"))
    (result,) = compare_evaluations(now, before).values()
    assert (result["prompts"], result["only_now"], result["only_before"]) == (5, 2, 1), "the sixth is new"
    assert (result["accuracy_before"], result["accuracy_now"]) == (pytest.approx(0.4), pytest.approx(0.6))
    assert result["difference"]["mean"] == pytest.approx(0.2)
    assert result["mcnemar_p"] == 1.0


def test_several_responses_are_compared_by_their_means() -> None:
    (result,) = compare_evaluations(rows_of(answered("rr", "rw")), rows_of(answered("ww", "rw"))).values()
    assert (result["difference"]["mean"], "mcnemar_p" in result) == (0.5, False)


def test_other_prompts_are_not_compared() -> None:
    now = [row | {"prompt": "another"} for row in rows_of(answered("r"))]
    assert compare_evaluations(now, rows_of(answered("r"))) == {"set": {"prompts": 0}}
