"""Metrics of outcomes against numpy and by hand; a trajectory survives JSON."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.batch.trajectory import Span, StopReason, Trajectory
from megatron_grpo.rollouts.rollout_metrics import (
    compute_age_metrics,
    compute_group_metrics,
    compute_length_metrics,
    compute_reward_function_metrics,
    compute_rollout_metrics,
)
from tests.support.trajectories import failed_trajectory, make_outcome, make_trajectory, plain


def test_length_percentiles_and_endings() -> None:
    lengths = [3, 50, 7, 7, 12, 31, 4]
    metrics = compute_length_metrics([make_outcome(n, stop_reason="length" if n > 30 else "stop") for n in lengths])
    for percentile in (50, 90, 99):
        expected = float(np.percentile(lengths, percentile))
        assert metrics[f"response_length_p{percentile}"] == pytest.approx(expected, rel=1e-6)
    assert metrics["natural_termination_rate"] == pytest.approx(5 / 7)


def test_ages_and_versions() -> None:
    """The oldest token says how old a trajectory is; one that failed before its first token has no age."""
    outcome = make_outcome(4, spans=[Span(1, 5, 7)])
    spread = make_outcome(4, spans=[Span(1, 2, 5), Span(2, 4, 6), Span(4, 5, 7)])
    assert compute_age_metrics([outcome, spread, failed_trajectory().outcome], version=7) == {
        "trajectory_age": 1.0,
        "trajectory_age_max": 2.0,
        "trajectory_versions": 2.0,
        "trajectory_versions_max": 3.0,
    }
    assert set(compute_age_metrics([failed_trajectory().outcome], version=7).values()) == {0.0}


def test_outcomes_by_group() -> None:
    right = [[False, False], [True, False], [True, True], [False, True]]
    outcomes = [make_outcome(correct=is_correct) for group in right for is_correct in group]
    shares = {"groups_all_wrong": 0.25, "groups_mixed": 0.5, "groups_all_right": 0.25}
    assert compute_group_metrics(outcomes, samples_per_prompt=2) == {**shares, "reward_std": 0.0}
    assert compute_rollout_metrics(outcomes)["accuracy"] == 0.5


def test_nothing_is_said_of_what_the_environment_cannot_say() -> None:
    """An accuracy of 0 for responses that nobody judged would stop a run early, or rank its checkpoints."""
    unknown = [make_outcome(correct=None, reward=reward) for reward in (1.0, None)]
    assert compute_group_metrics(unknown, samples_per_prompt=2) == {}
    metrics = compute_rollout_metrics(unknown)
    assert "accuracy" not in metrics
    assert metrics["reward"] == 1.0
    assert "reward" not in compute_rollout_metrics(unknown[1:])
    half = [*unknown, make_outcome(correct=True), make_outcome(correct=False)]
    assert compute_rollout_metrics(half)["accuracy"] == 0.5
    assert compute_group_metrics(half, samples_per_prompt=2)["groups_mixed"] == 1.0, "of the groups that can be judged"


def test_the_spread_of_rewards_is_that_within_groups() -> None:
    rewards = np.array([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0], [-1.0, 0.5, 0.25]])
    outcomes = [make_outcome(reward=reward) for reward in rewards.flatten().tolist()]
    spread = compute_group_metrics(outcomes, samples_per_prompt=3)["reward_std"]
    assert spread == pytest.approx(rewards.std(axis=1, ddof=1).mean(), rel=1e-6)
    alone = compute_group_metrics(outcomes, samples_per_prompt=1)["reward_std"]
    assert alone == pytest.approx(rewards.std(ddof=1), rel=1e-6)


def test_rewards_by_function_leave_out_what_a_function_did_not_score() -> None:
    parts: list[dict[str, float]] = [{"a": 1.0, "b": 2.0}, {"a": 0.0}, {"a": 0.5, "b": 4.0}, {}]
    metrics = compute_reward_function_metrics(
        [make_outcome(reward=sum(part.values()) if part else None, reward_parts=part) for part in parts]
    )
    assert metrics == {
        "reward/a": 0.5,
        "reward_std/a": pytest.approx(float(np.std([1.0, 0.0, 0.5], ddof=1))),
        "reward/b": 3.0,
        "reward_std/b": pytest.approx(2**0.5),
        "unscored_rate": 0.25,
    }


def test_the_only_response_that_a_function_scored_has_no_spread() -> None:
    metrics = compute_reward_function_metrics([make_outcome(reward=1.0, reward_parts={"a": 1.0})])
    assert metrics["reward_std/a"] == 0.0


def test_a_failed_rollout_counts_as_a_response_of_no_tokens() -> None:
    """It is in no reward and no accuracy, and no group is all right or all wrong by it."""
    version = [Span(1, 3, 4)]
    failed = failed_trajectory().outcome
    outcomes = [make_outcome(2, reward=1.0, correct=True, spans=version), failed, failed, failed]
    metrics = compute_rollout_metrics(outcomes)
    assert metrics == {
        "reward": 1.0,
        "accuracy": 1.0,
        "response_length": 0.5,
        "response_length_max": 2.0,
        "truncation_rate": 0.0,
        "weight_version": 4.0,
    }
    assert compute_group_metrics(outcomes, samples_per_prompt=2) == {}
    assert compute_reward_function_metrics(outcomes) == {}, "it was never there to be scored"
    assert compute_length_metrics(outcomes)["response_length_p50"] == 0


def test_the_newest_version_is_reported() -> None:
    spans = [[Span(1, 2, 3), Span(2, 3, 5)], [Span(1, 3, 4)]]
    assert compute_rollout_metrics([make_outcome(spans=span) for span in spans])["weight_version"] == 5


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([0.0, -1.0, math.nan, -math.inf]), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_an_outcome_is_its_trajectorys(drawn: list[tuple[int, float, bool]]) -> None:
    """Counted over lists; the last token of each has the log-probability that was drawn for it."""
    for tokens, logprob, truncated in drawn:
        logprobs = [-0.5] * (tokens - 1) + [logprob] * (tokens > 0)
        stop: StopReason = "length" if truncated else "stop"
        trajectory = make_trajectory(tokens, prompt_tokens=3, logprobs=logprobs, stop_reason=stop, sample=2)
        outcome = trajectory.outcome
        assert (outcome.tokens, outcome.response_tokens) == (3 + tokens, tokens)
        assert (outcome.truncated, outcome.sample) == (truncated, 2)
        assert outcome.finite_logprobs == all(map(math.isfinite, logprobs))
        assert outcome.version == 0
    assert failed_trajectory(failure="why").outcome.failure == "why"
    assert failed_trajectory().outcome.version == -1


@pytest.mark.parametrize("failed", [False, True])
def test_a_trajectory_survives_json(failed: bool) -> None:
    trajectory = make_trajectory(
        3, correct=True, stop_reason="length", reward_parts={"a": 1 / 3}, logprobs=[-0.1, -1 / 3, -2]
    )
    if failed:
        trajectory = failed_trajectory(prompt_tokens=2)
    again = Trajectory.from_row(json.loads(json.dumps(trajectory.to_row())))
    assert plain(again) == plain(trajectory)
    trajectory.routed = None if failed else np.array([[0, 1, 255], [127, 128, 5]], dtype=np.uint8)
    saved = Trajectory.from_row(json.loads(json.dumps(trajectory.to_saved_row())))
    assert plain(saved) == plain(trajectory)
    assert saved.routed is None or saved.routed.dtype == np.uint8
    assert plain(Trajectory.from_row(trajectory.to_row())) == plain(again), "people do not read which experts"
    assert (again.token_ids.dtype, again.logprobs.dtype) == (np.int32, np.float32)


def test_repeated_calls_are_counted() -> None:
    """A group's first response has the number; the others have none."""
    outcomes = [make_outcome(reward=1.0) for _ in range(6)]
    assert "scoring_retries" not in compute_reward_function_metrics(outcomes)
    for outcome in (outcomes[0], outcomes[4]):
        outcome.reward_metrics = {"scoring_retries": 1.0}
    assert compute_reward_function_metrics(outcomes)["scoring_retries"] == 2.0
