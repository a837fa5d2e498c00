"""Suspect responses: short ones are found, those of chosen figures lose their reward, and nothing learns from them."""

from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.algorithms.step_advantages import score
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.schema import AdvantageEstimatorConfig, Config, EnvironmentConfig, GRPOConfig
from megatron_grpo.losses.advantages import group_advantages
from megatron_grpo.preflight.reward_checks import check_environments
from megatron_grpo.preflight.rules import find_broken_rules
from megatron_grpo.rollouts.rollout import flag_suspicious
from megatron_grpo.rollouts.rollout_metrics import compute_reward_function_metrics, compute_rollout_metrics
from tests.support.trajectories import failed_trajectory, make_trajectory

SHORT = "suspect/unusually_short"
TOUCHED = {"suspect/touched_harness": 1.0}

RESPONSES = st.builds(
    make_trajectory,
    st.integers(0, 40),
    reward=st.none() | st.sampled_from([-1.0, 0.0, 0.5, 1.0]),
    correct=st.none() | st.booleans(),
) | st.builds(failed_trajectory)


@given(st.lists(RESPONSES, min_size=1, max_size=9))
def test_unusually_short_responses_against_a_loop(group: list[Trajectory]) -> None:
    scored = [trajectory for trajectory in group if trajectory.reward is not None]
    expected: list[float | None] = []
    for trajectory in group:
        if trajectory.reward is None or len(scored) < 4:
            expected.append(None)
            continue
        deserves = trajectory.correct
        if deserves is None:
            deserves = trajectory.reward > fmean(peer.reward for peer in scored if peer.reward is not None)
        expected.append(
            float(deserves and 4 * trajectory.response_tokens < median(len(peer.logprobs) for peer in scored))
        )
    before = [(trajectory.reward, trajectory.correct) for trajectory in group]
    flag_suspicious(group, [])
    assert [trajectory.reward_metrics.get(SHORT) for trajectory in group] == expected
    assert [(trajectory.reward, trajectory.correct) for trajectory in group] == before, (
        "nobody is left out unless somebody asks for it"
    )
    assert all("suspects_left_out" not in trajectory.reward_metrics for trajectory in group)


def group_of_four(**changes: Any) -> list[Trajectory]:
    """Rewards 1, 0, 1, 0, of which the first is suspect."""
    group = [make_trajectory(8, sample=i, reward=float(i % 2 == 0), correct=i % 2 == 0) for i in range(4)]
    group[0].reward_metrics = dict(TOUCHED)
    for trajectory in group:
        for name, value in changes.items():
            setattr(trajectory, name, value)
    return group


def test_a_suspect_response_teaches_nothing_and_is_no_baseline() -> None:
    group = group_of_four()
    flag_suspicious(group, ["touched_harness", "equal_outputs"])
    first, *peers = group
    assert (first.reward, first.correct, first.failure) == (None, False, None)
    assert first.notes == {"left out": "suspect by touched_harness; its reward was 1"}
    assert [trajectory.reward for trajectory in peers] == [0.0, 1.0, 0.0]
    outcomes = [trajectory.outcome for trajectory in group]
    config = Config(grpo=GRPOConfig(num_generations_per_prompt=4))
    scores, batch = score(config, outcomes), StepBatch.from_outcomes(config, outcomes)
    assert batch.in_loss.tolist() == [False, True, True, True]
    assert scores.has_signal.tolist() == [True]
    relative = group_advantages(scores.rewards, leave_one_out=True, normalize=False)
    assert relative.tolist() == [[0.0, -0.5, 1.0, -0.5]], (
        "the baseline of each is the mean of the two other honest ones"
    )


def test_dynamic_sampling_looks_at_the_others_alone() -> None:
    group = group_of_four()
    for trajectory in group[1:]:
        trajectory.reward, trajectory.correct = 0.0, False
    config = Config(grpo=GRPOConfig(num_generations_per_prompt=4, use_dynamic_sampling=True))
    assert score(config, [trajectory.outcome for trajectory in group]).has_signal.tolist() == [True]
    flag_suspicious(group, ["touched_harness"])
    assert score(config, [trajectory.outcome for trajectory in group]).has_signal.tolist() == [False]


def test_no_part_of_a_reward_is_left_for_gdpo() -> None:
    functions = ["rewards.right", "rewards.brief"]
    environment = EnvironmentConfig(type="reward_functions", reward_funcs=functions)
    estimator = AdvantageEstimatorConfig(name="gdpo")
    config = Config(grpo=GRPOConfig(num_generations_per_prompt=4, adv_estimator=estimator), env={"": environment})
    group = group_of_four(reward_parts={"right": 1.0, "brief": 0.5})
    flag_suspicious(group, ["touched_harness"])
    parts = score(config, [trajectory.outcome for trajectory in group]).reward_parts
    assert parts is not None
    assert parts.isnan().all(dim=0).tolist() == [[True, False, False, False]]


def test_metrics_tell_how_many_and_no_function_is_blamed() -> None:
    group = group_of_four()
    flag_suspicious(group, ["touched_harness"])
    outcomes = [trajectory.outcome for trajectory in group]
    metrics = compute_reward_function_metrics(outcomes)
    assert metrics["suspects_left_out"] == 0.25
    assert metrics.get("unscored_rate", 0.0) == 0.0
    assert compute_rollout_metrics(outcomes)["accuracy"] == 0.25, "what was left out is not known to be right"
    assert compute_rollout_metrics(outcomes)["reward"] == pytest.approx(1 / 3)


def test_what_is_unusually_short_can_be_left_out() -> None:
    group = [make_trajectory(tokens, sample=i, reward=1.0, correct=None) for i, tokens in enumerate([2, 40, 50, 60])]
    group[1].reward = 0.0
    flag_suspicious(group, ["unusually_short"])
    assert [trajectory.reward for trajectory in group] == [None, 0.0, 1.0, 1.0]
    assert group[0].correct is None


@pytest.mark.parametrize(
    ("kind", "figure", "samples", "text"),
    [
        ("code", "touched_harness", 2, None),
        (
            "code",
            "idle_test",
            4,
            "is no sign that type code reports; it reports touched_harness, idle_tests, equal_outputs",
        ),
        ("math", "touched_harness", 4, "is no sign that type math reports; it reports unusually_short"),
        ("math", "unusually_short", 4, None),
        ("math", "unusually_short", 3, "compares at least 4 samples of a prompt"),
        ("mine:Environment", "anything", 4, None),
    ],
)
def test_figures_have_to_be_there(kind: str, figure: str, samples: int, text: str | None) -> None:
    environment = EnvironmentConfig(type=kind, leave_out_suspects=[figure])
    config = Config(env={"task": environment}, grpo=GRPOConfig(num_generations_per_prompt=samples))
    config.data.answer_key = "answer"
    problems = list(find_broken_rules(config, check_environments(config)))
    assert [problem.subject for problem in problems] == [f"env.task.leave_out_suspects={figure}"] * (text is not None)
    assert all(problem.text.startswith(text or "") for problem in problems)
