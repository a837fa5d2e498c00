"""Figures of environments from a reward function to the files of a run: none replaces a metric of the run."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_grpo.algorithms.step_report import compute_sampling_metrics
from megatron_grpo.batch.environment_metrics import MAX_METRICS
from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ResponseFault
from megatron_grpo.environments import environment_worker as worker_module
from megatron_grpo.environments.environment_worker import EnvironmentWorker
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.reward_functions import RewardFunctionEnvironment
from megatron_grpo.observability.page.write import write_report
from megatron_grpo.observability.run_files import read_lines
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.rollouts.rollout import flag_suspicious
from tests.support.trajectories import make_trajectory

HOSTILE = (
    *("reward", "accuracy", "response_length", "loss", "step", "timing", "throughput", "val_accuracy", "unscored_rate"),
    *("suspects_left_out", "suspect/unusually_short", "suspect/", "reward/f", "reward_std/f", "task_reward/a", "env/x"),
    *("", " ", "a/../b", "//", "ü (%)", "\ud800", "x\ny", "__proto__", "x" * 10_000, "<script>"),
)
TIMING = {"total": 1.0}


def scored_by(monkeypatch: pytest.MonkeyPatch, function: Any) -> list[EnvironmentReturn]:
    """The scores that an environment's process sends for eight responses of different length."""
    monkeypatch.setattr(worker_module, "begin_process_log", lambda _: None)
    worker = EnvironmentWorker("a", EnvironmentConfig(), EnvironmentSettings())
    worker._environment = RewardFunctionEnvironment({"f": function}, {"f": 1.0}, "f")
    request = EnvironmentRequest(prompt="p", response="r", stop_reason="stop", extra_env_info={})
    scores = worker.score([request] * 8)
    assert all(isinstance(score, EnvironmentReturn) for score in scores), scores
    return [score for score in scores if isinstance(score, EnvironmentReturn)]


def step_metrics_of(scores: list[EnvironmentReturn]) -> dict[str, float]:
    group = [
        make_trajectory(1 + number, reward=score.reward, correct=score.correct, reward_parts=score.parts)
        for number, score in enumerate(scores)
    ]
    for trajectory, score in zip(group, scores, strict=True):
        trajectory.reward_metrics = score.metrics
    flag_suspicious(group, ["touched"])
    sampled = [trajectory.outcome for trajectory in group]
    config = Config()
    config.grpo.num_generations_per_prompt = 8
    differs = SimpleNamespace(differs=torch.ones(8, dtype=torch.bool))
    samples: Any = SimpleNamespace(sampled=sampled, outcomes=sampled, metrics={"dropped": 1.0}, scores=differs)
    return compute_sampling_metrics(config, samples)


def rewards(count: int) -> list[float]:
    return [float(number % 2) for number in range(count)]


def quiet(completions: list[str], **_: Any) -> list[float]:
    return rewards(len(completions))


def loud(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
    for name in HOSTILE:
        log_metric(name, 99.0)
    log_metric("touched", np.float32(0.5))
    log_metric("of_torch", torch.tensor(2.0))
    log_metric("nothing", math.nan)
    return rewards(len(completions))


def test_no_figure_replaces_a_metric_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet_metrics, together = (step_metrics_of(scored_by(monkeypatch, function)) for function in (quiet, loud))
    assert {name: together[name] for name in quiet_metrics} == quiet_metrics
    added = together.keys() - quiet_metrics.keys()
    assert all(name.startswith(("env/", "suspect/")) for name in added)
    for name in ("reward", "accuracy", "step", "suspects_left_out", "suspect/unusually_short", "reward/f", "env/x"):
        assert together[f"env/{name}"] == 99.0
    assert (together["env/touched"], together["env/of_torch"]) == (0.5, 2.0)
    assert math.isnan(together["env/nothing"])


def test_signs_keep_their_names_and_take_rewards_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def suspicious(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("suspect/touched", 1)
        return rewards(len(completions))

    metrics = step_metrics_of(scored_by(monkeypatch, suspicious))
    assert (metrics["suspect/touched"], metrics["suspects_left_out"]) == (1.0, 1.0)
    assert "reward" not in metrics


def test_files_survive_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.logger.tensorboard = True
    metrics = step_metrics_of(scored_by(monkeypatch, loud))
    logger = RunLogger(tmp_path, config)
    for step in (1, 2, 3):
        logger.log_step(step, metrics, TIMING, {})
    assert len(logger._trackers) == 1, "the tracker did not fail"
    logger.close()
    logger = RunLogger(tmp_path, config, resume_step=2)
    logger.log_step(3, metrics, TIMING, {})
    logger.close()
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert (rows[2]["reward"], rows[2]["env/reward"], rows[2]["env/nothing"]) == (0.5, 99.0, None)
    assert write_report([tmp_path]).exists()


def test_names_are_bounded_in_a_step_and_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        for number in range(10 * MAX_METRICS):
            log_metric(f"{len(names)}-{number}", 1.0)
            log_metric(f"suspect/{len(names)}-{number}", 1.0)
        names.append("")
        return rewards(len(completions))

    names: list[str] = []
    logger = RunLogger(tmp_path, Config())
    for step in range(1, 4):
        metrics = step_metrics_of(scored_by(monkeypatch, endless))
        assert sum(name.startswith(("env/", "suspect/")) for name in metrics) == MAX_METRICS + 1
        assert "suspect/unusually_short" in metrics
        logger.log_step(step, {**metrics, "env/last": 1.0}, TIMING, {})
    logger.close()
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert len({name for row in rows for name in row if "/" in name}) == MAX_METRICS + 3
    assert all("reward" in row and "suspect/unusually_short" in row for row in rows)


def test_a_figure_that_is_not_a_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "begin_process_log", lambda _: None)
    worker = EnvironmentWorker("a", EnvironmentConfig(), EnvironmentSettings())
    returned = EnvironmentReturn(reward=1.0, correct=None, metrics={"f": "many"})  # type: ignore[dict-item]
    worker._environment = SimpleNamespace(score=lambda requests: [returned] * len(requests))  # type: ignore[assignment]
    request = EnvironmentRequest(prompt="p", response="r", stop_reason="stop", extra_env_info={})
    message = worker.score([request])
    assert isinstance(message, ResponseFault)
    assert message.reason.startswith("environment a: ValueError: figure 'f' is str, and not a number (")


def test_recordings_of_earlier_versions_have_bare_names() -> None:
    row = {"reward": 99.0, "suspect/x": 1.0, "suspects_left_out": 0.0}
    scores = [EnvironmentReturn(reward=0.25, correct=True, metrics=row) for _ in range(8)]
    metrics = step_metrics_of(scores)
    assert (metrics["reward"], metrics["env/reward"], metrics["suspect/x"]) == (0.25, 99.0, 1.0)
    assert json.dumps(metrics)
