"""Validation with a fake collector: how it samples, and what it makes of the responses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.validation import validate
from tests.support.trajectories import make_trajectory

TRAINING = SamplingSettings(max_new_tokens=5, temperature=0.7, top_p=0.9, top_k=3, stop_token_ids=(1,))


class Collector:
    """Answers row i with i + 1 tokens and reward i; odd rows are right."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def collect(self, prompts: list[dict[str, int]], **asked: Any) -> list[Trajectory]:
        rows = [prompt["idx"] for prompt in prompts]
        self.asked.append({"rows": rows, **asked})
        return [make_trajectory(i + 1, prompt_idx=i, reward=float(i), correct=i % 2 == 1) for i in rows]


def make_run(folder: Path, *overrides: str, rows: int = 5) -> Any:
    return SimpleNamespace(
        config=compose_config(["+exp=quickstart", *overrides]),
        state={"total_steps": 7},
        sampling=TRAINING,
        collector=Collector(),
        val_prompts=[{"idx": i} for i in range(rows)],
        logger=SimpleNamespace(run_dir=folder, show_samples=lambda *_: None),
    )


@pytest.mark.parametrize(("overrides", "temperature"), [([], 0.0), (["grpo.val_temperature=0.3"], 0.3)])
def test_validation_has_a_temperature_of_its_own(overrides: list[str], temperature: float, tmp_path: Path) -> None:
    run = make_run(tmp_path, *overrides)
    validate(run)
    (asked,) = run.collector.asked
    assert asked["settings"] == replace(TRAINING, temperature=temperature)
    assert run.sampling == TRAINING


def test_every_prompt_is_answered_once_and_the_same_way_each_time(tmp_path: Path) -> None:
    run = make_run(tmp_path, "grpo.val_batch_size=2")
    metrics = validate(run)
    assert [asked["rows"] for asked in run.collector.asked] == [[0, 1], [2, 3], [4]]
    assert {asked["samples_per_prompt"] for asked in run.collector.asked} == {1}
    run.state["total_steps"] += 1
    assert validate(run) == metrics
    seeds = [(asked["run_seed"], asked["step"]) for asked in run.collector.asked]
    assert len(set(seeds)) == 1, "accuracies of different steps are to compare"


def test_its_metrics_by_hand(tmp_path: Path) -> None:
    metrics = validate(make_run(tmp_path))
    assert metrics == {"val_accuracy": 0.4, "val_reward": 2.0, "val_response_length": 3.0, "val_truncation_rate": 0.0}


def test_without_prompts_there_is_nothing_to_say(tmp_path: Path) -> None:
    run = make_run(tmp_path, rows=0)
    assert validate(run) == {}
    assert run.collector.asked == []
