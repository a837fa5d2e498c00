"""Validation with fake rollouts: how it samples, and what it makes of the responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.algorithms.validation import compute_held_out_metrics, validate
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.preflight.load import compose_config
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import SETTINGS, make_sampling_run
from tests.support.trajectories import failed_trajectory, make_trajectory, plain


def answers(prompts: Sequence[DatumSpec], samples: int) -> list[list[Trajectory]]:
    """i + 1 tokens and reward i for row i; odd rows are right."""
    assert samples == 1
    rows = [prompt["idx"] for prompt in prompts]
    return [[make_trajectory(i + 1, prompt_idx=i, reward=float(i), correct=i % 2 == 1)] for i in rows]


def make_run(folder: Path, *overrides: str, rows: int = 5) -> Any:
    run: Any = make_sampling_run(compose_config(["+exp=quickstart", *overrides]), folder, FakeRollouts(answers))
    run.state["total_steps"] = 7
    run.val_prompts = [{"idx": i, "task_name": "task"} for i in range(rows)]
    run.shown = []
    run.logger = SimpleNamespace(
        show_samples=lambda prompts, trajectories: run.shown.extend(zip(prompts, trajectories, strict=False))
    )
    return run


@pytest.mark.parametrize(("overrides", "temperature"), [([], 0.0), (["grpo.val_temperature=0.3"], 0.3)])
def test_validation_has_a_temperature_of_its_own(overrides: list[str], temperature: float, tmp_path: Path) -> None:
    run = make_run(tmp_path, *overrides)
    validate(run, StepTimer())
    (request,) = run.rollouts.asked
    assert request["sampling"] == replace(SETTINGS, temperature=temperature)
    assert run.settings == SETTINGS


def test_every_prompt_is_answered_once_and_the_same_way_each_time(tmp_path: Path) -> None:
    run = make_run(tmp_path, "grpo.val_batch_size=2")
    metrics = validate(run, StepTimer())
    assert [call["rows"] for call in run.rollouts.asked] == [[0, 1], [2, 3], [4]]
    assert {call["samples_per_prompt"] for call in run.rollouts.asked} == {1}
    run.state["total_steps"] += 1
    assert validate(run, StepTimer()) == metrics
    seeds = [(request["run_seed"], request["generation_batch"]) for request in run.rollouts.asked]
    assert len(set(seeds)) == 1, "accuracies of different steps are to compare"
    assert run.state["generation_batches"] == 0, "nor does it change what training draws next"


def test_its_metrics_by_hand(tmp_path: Path) -> None:
    metrics = validate(make_run(tmp_path), StepTimer())
    assert metrics == {"val_accuracy": 0.4, "val_reward": 2.0, "val_response_length": 3.0, "val_truncation_rate": 0.0}


@pytest.mark.parametrize("limit", [0, 3, 9])
def test_only_what_is_shown_comes_to_the_driver(limit: int, tmp_path: Path) -> None:
    run = make_run(tmp_path, f"logger.num_val_samples_to_print={limit}", "grpo.val_batch_size=2")
    validate(run, StepTimer())
    count = min(limit, 5)
    assert len(run.rollouts.fetched) == count
    assert [prompt["idx"] for prompt, _ in run.shown] == list(range(count))
    expected = [group[0] for group in answers(run.val_prompts, 1)[:count]]
    assert [plain(trajectory) for _, trajectory in run.shown] == [plain(rollout) for rollout in expected]


def test_a_rollout_that_failed_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.rollouts.answers = lambda prompts, samples: [*answers(prompts[:4], samples), [failed_trajectory(prompt_idx=4)]]
    metrics = validate(run, StepTimer())
    assert (metrics["val_accuracy"], metrics["val_reward"], metrics["val_failed_rollouts"]) == (0.5, 1.5, 1.0)


def test_responses_at_fault_are_wrong_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    def break_fourth(prompts: Any, samples: int) -> Any:
        groups = answers(prompts, samples)
        groups[3][0].fault, groups[3][0].reward, groups[3][0].correct = "environment task: it hangs", 0.0, False
        return groups

    sound = validate(run, StepTimer())
    run.rollouts.answers = break_fourth
    metrics = validate(run, StepTimer())
    assert "val_faulty_responses" not in sound
    assert metrics["val_faulty_responses"] == 1.0
    assert "val_failed_rollouts" not in metrics
    assert metrics["val_accuracy"] == pytest.approx(0.2)


def test_rollouts_that_failed_are_counted_by_task_and_set(tmp_path: Path) -> None:
    """Else an environment that fails on hard prompts would raise the accuracy without a word."""
    run = make_run(tmp_path)
    for prompt in run.val_prompts:
        prompt["task_name"], prompt["dataset"] = "odd" if prompt["idx"] % 2 else "even", f"set{prompt['idx'] // 4}"
    failed = [[failed_trajectory(prompt_idx=row)] for row in (2, 3, 4)]
    run.rollouts.answers = lambda prompts, samples: [*answers(prompts[:2], samples), *failed]
    metrics = validate(run, StepTimer())
    counts = {name: value for name, value in metrics.items() if "failed" in name}
    by_task = {"val_task_failed_rollouts/even": 2.0, "val_task_failed_rollouts/odd": 1.0}
    by_set = {"val_set_failed_rollouts/set0": 2.0, "val_set_failed_rollouts/set1": 1.0}
    assert counts == {"val_failed_rollouts": 3.0, **by_task, **by_set}


def test_without_prompts_there_is_nothing_to_say(tmp_path: Path) -> None:
    run = make_run(tmp_path, rows=0)
    assert validate(run, StepTimer()) == {}
    assert run.rollouts.asked == []


def test_tasks_and_functions_by_hand(tmp_path: Path) -> None:
    run = make_run(tmp_path, rows=4)
    for prompt in run.val_prompts:
        prompt["task_name"] = "odd" if prompt["idx"] % 2 else "even"
    parts = [{"format": 1.0}, {"format": 0.0, "exact": 0.5}, {"format": 1.0}, {}]

    def scored(prompts: Sequence[DatumSpec], samples: int) -> list[list[Trajectory]]:
        firsts = [group[0] for group in answers(prompts, samples)]
        return [[replace(trajectory, reward_parts=parts[trajectory.prompt_idx])] for trajectory in firsts]

    run.rollouts.answers = scored
    timer = StepTimer()
    metrics = validate(run, timer)
    assert {name: metrics[name] for name in metrics if "/" in name} == {
        "val_reward/format": pytest.approx(2 / 3),
        "val_reward/exact": 0.5,
        "val_task_accuracy/even": 0.0,
        "val_task_reward/even": 1.0,
        "val_task_response_length/even": 2.0,
        "val_task_accuracy/odd": 1.0,
        "val_task_reward/odd": 2.0,
        "val_task_response_length/odd": 3.0,
        "val_task_truncation_rate/even": 0.0,
        "val_task_truncation_rate/odd": 0.0,
    }
    assert "generation" in timer.seconds


def test_sets_that_have_names_have_figures_of_their_own() -> None:
    prompts: list[Any] = [
        {"idx": number, "task_name": "math", **({"dataset": name} if name else {})}
        for number, name in enumerate(["a", "b", None, "a"])
    ]
    outcomes = [[make_trajectory(2, reward=float(number), correct=number == 3).outcome] for number in range(4)]
    metrics = compute_held_out_metrics(prompts, outcomes)
    assert (metrics["reward"], metrics["set_reward/a"], metrics["set_reward/b"]) == (1.5, 1.5, 1.0)
    assert (metrics["set_accuracy/a"], metrics["set_accuracy/b"]) == (0.5, 0.0)
    assert not any(name.startswith("task_") for name in metrics), "they are of one task"
