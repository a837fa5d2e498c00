"""Results of an evaluation by hand; estimates against closed forms, enumeration and scipy."""

from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.evaluation.results import (
    AnsweredSet,
    compare_evaluations,
    compute_bootstrap_interval,
    compute_mcnemar_p,
    compute_set_results,
    compute_wilcoxon_p,
    estimate_consensus_at_k,
    estimate_pass_at_k,
    find_vote,
    make_sample_row,
)
from tests.support.trajectories import failed_trajectory, make_trajectory


def datum(idx: int) -> DatumSpec:
    rest: dict[str, Any] = {"message_log": [], "length": 1, "loss_multiplier": 1.0, "task_name": "task"}
    return {"extra_env_info": {REFERENCE: str(idx)}, "idx": idx, "prompt": f"prompt {idx}", **rest}


def make_answered_set(*marks: str) -> AnsweredSet:
    """Prompts with a response for each letter: r right, w wrong, f failed, ? not judged."""
    makers = {
        "r": lambda n: make_trajectory(2, sample=n, correct=True, reward=1.0, response="7"),
        "w": lambda n: make_trajectory(4, sample=n, correct=False, reward=0.0, response=f"no {n}"),
        "f": lambda n: failed_trajectory(sample=n),
        "?": lambda n: make_trajectory(2, sample=n, correct=None, reward=0.5, response="?"),
    }
    answered_set = AnsweredSet([datum(idx) for idx in range(len(marks))], [], [])
    for prompt, letters in zip(answered_set.prompts, marks, strict=True):
        trajectories = [makers[letter](number) for number, letter in enumerate(letters)]
        answered_set.outcomes.append([trajectory.outcome for trajectory in trajectories])
        answered_set.rows.append([make_sample_row("set", prompt, trajectory) for trajectory in trajectories])
    return answered_set


def test_figures_of_a_set_by_hand() -> None:
    results = compute_set_results(make_answered_set("rrww", "wwww", "rfff", "????"), [1, 4])
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
    results = compute_set_results(make_answered_set("??", "?f"), [1])
    assert "accuracy" not in results
    assert "pass@1" not in results
    assert results["reward"]["mean"] == 0.5


@pytest.mark.parametrize(
    ("responses", "vote"),
    [
        (["so \\boxed{ \\sqrt{2} }."], "\\sqrt{2}"),
        (["first\n 42 \n"], "42"),
        (["we go\nleft  then right"], "left then right"),
        (["", " \n"], None),
        (["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", "\\boxed{\\dfrac12}", "it is\n1/2", "Answer: **.50**."], "1/2"),
        (["\\boxed{-1,200}", "\\boxed{-1200.0}", "#### -1200", "The answer is $-1200$."], "-1200"),
        (["\\boxed{(B)}", "\\boxed{B}", "The answer is (B).", "**Answer:** B"], "B"),
        (["\\boxed{(1, 2)}", "\\boxed{(1,2)}"], "(1,2)"),
    ],
)
def test_equal_answers_are_one_vote(responses: list[str], vote: str | None) -> None:
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


def rows_of(answered_set: AnsweredSet) -> list[dict[str, Any]]:
    return [row for rows in answered_set.rows for row in rows]


def test_a_comparison_pairs_prompts() -> None:
    before = rows_of(make_answered_set("w", "w", "r", "w", "r"))
    now = rows_of(make_answered_set("r", "r", "r", "w", "w", "r"))
    (result,) = compare_evaluations(now, before).values()
    assert (result["prompts"], result["only_now"], result["only_before"]) == (5, 2, 1), "the sixth is new"
    assert (result["accuracy_before"], result["accuracy_now"]) == (pytest.approx(0.4), pytest.approx(0.6))
    assert result["difference"]["mean"] == pytest.approx(0.2)
    assert result["mcnemar_p"] == 1.0


def test_several_responses_are_compared_by_their_means() -> None:
    now, before = (rows_of(make_answered_set(*marks)) for marks in (("rr", "rw"), ("ww", "rw")))
    (result,) = compare_evaluations(now, before).values()
    assert (result["difference"]["mean"], "mcnemar_p" in result) == (0.5, False)


def test_other_prompts_are_not_compared() -> None:
    now = [row | {"prompt": "another"} for row in rows_of(make_answered_set("r"))]
    assert compare_evaluations(now, rows_of(make_answered_set("r"))) == {"set": {"prompts": 0}}


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        drawn_from = [number < right for number in range(samples)]
        for k in range(1, samples + 1):
            draws = [any(draw) for draw in combinations(drawn_from, k)]
            assert estimate_pass_at_k(samples, right, k) == pytest.approx(fmean(draws))


def test_pass_at_k_is_unbiased() -> None:
    """Of samples that are right with probability p: 1 - (1 - p)^k, unlike the plug-in of c / n."""
    generator = np.random.default_rng(0)
    counts = generator.binomial(8, 0.2, size=40_000)
    estimate = fmean(estimate_pass_at_k(8, int(right), 4) for right in counts)
    assert estimate == pytest.approx(1 - 0.8**4, abs=0.006)
    assert abs(fmean(1 - (1 - right / 8) ** 4 for right in counts) - (1 - 0.8**4)) > 0.05
    assert estimate_pass_at_k(5000, 1, 2500) == pytest.approx(0.5), "without an overflow"


def test_more_draws_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pass@5 needs at least 5 samples of a prompt, and there are 4"):
        estimate_pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match=r"cons@5 needs at least 5"):
        estimate_consensus_at_k(["1"] * 4, [True] * 4, 5)


def test_consensus_by_hand() -> None:
    answers = ["7", "8", "8", "7", "7", None, "9"]
    right = [True, False, False, True, True, False, False]
    assert estimate_consensus_at_k(answers, right, 1) == pytest.approx(3 / 7)
    assert estimate_consensus_at_k(answers, right, 3) == 0.5, (
        "8 wins the first three, 7 the next three; the last is left over"
    )
    assert estimate_consensus_at_k(answers, right, 7) == 1.0
    assert estimate_consensus_at_k(answers[:2], right[:2], 2) == 1.0, "of two that are equally many, the first"
    assert estimate_consensus_at_k([None, None], [True, True], 2) == 0.0


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    hits = []
    for _ in range(200):
        interval = compute_bootstrap_interval(generator.binomial(1, 0.6, size=80).astype(float).tolist())
        hits.append(interval["low"] <= 0.6 <= interval["high"])
    assert 0.9 <= fmean(hits) <= 0.99


def test_the_interval_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(2).normal(size=60)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=3).confidence_interval
    ours = compute_bootstrap_interval(values.tolist())
    assert (ours["low"], ours["high"]) == pytest.approx((theirs.low, theirs.high), abs=0.02)
    assert ours == compute_bootstrap_interval(values.tolist()), "the same samples have the same interval"


def test_mcnemar_is_the_binomial_test_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for first, second in [(0, 0), (1, 0), (3, 9), (9, 3), (20, 20), (2, 400)]:
        theirs = stats.binomtest(first, first + second, 0.5).pvalue if first + second else 1.0
        assert compute_mcnemar_p(first, second) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("values", ["normal", "ties", "accuracies"])
def test_wilcoxon_is_that_of_scipy(values: str) -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(4)
    drawn = {
        "normal": generator.normal(0.2, 1.0, size=70),
        "ties": generator.integers(-3, 5, size=90).astype(float),
        "accuracies": generator.binomial(8, 0.5, 60) / 8 - generator.binomial(8, 0.4, 60) / 8,
    }[values]
    theirs = stats.wilcoxon(drawn, zero_method="wilcox", correction=False, method="approx").pvalue
    assert compute_wilcoxon_p(drawn.tolist()) == pytest.approx(float(theirs), rel=1e-9)


def test_known_p_values() -> None:
    """Without scipy: McNemar by hand; eight positive differences of different size have z = 18 / sqrt(51)."""
    assert compute_mcnemar_p(1, 5) == pytest.approx(2 * (1 + 6) / 64)
    assert compute_wilcoxon_p([0.0, 0.0]) == 1.0
    assert compute_wilcoxon_p([1, 2, 3, 4, 5, 6, 7, 8]) == pytest.approx(0.01171872, rel=1e-5)


def test_differences_that_are_equal_but_for_rounding_are_tied() -> None:
    """One more right answer of three is 1 - 2/3 or 2/3 - 1/3, which differ in binary."""
    thirds = [(3, 2)] * 6 + [(0, 1)] * 2 + [(2, 0)]
    assert len({abs(now / 3 - before / 3) for now, before in thirds}) == 3, "two differences, one of them twice"
    accuracies = compute_wilcoxon_p([now / 3 - before / 3 for now, before in thirds])
    assert accuracies == pytest.approx(compute_wilcoxon_p([float(now - before) for now, before in thirds]), rel=1e-9)
    assert accuracies > 0.05
    assert compute_wilcoxon_p([0.1 + 0.2 - 0.3]) == 1.0, "no difference"
