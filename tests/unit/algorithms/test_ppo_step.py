"""The order of a PPO step, what each model is given, and that the policy waits while the value model warms up."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.algorithms import ppo, step
from megatron_grpo.algorithms.sampling import StepSamples
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.losses.interface import GlobalCounts, LossFunction
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.value_loss import MseValueLossFn
from megatron_grpo.models.source import known_shape
from megatron_grpo.policy.interface import NonFiniteGradientError, TrainResult
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.save_state import default_grpo_save_state
from tests.support.documented import undocumented
from tests.support.ppo_batch import make_trajectories


class FakeModel:
    """A model of one process whose number for every token is `number`: it takes the real loss but learns nothing."""

    device_name = "cpu"

    def __init__(self, name: str, number: float, log: list[str]) -> None:
        self.name, self.number, self.log = name, number, log
        self.batches: list[SequenceBatch] = []
        self.shape = known_shape(compose_config(["+exp=quickstart_ppo"]))

    def of_tokens(self, batch: SequenceBatch) -> Tensor:
        self.log.append(f"{self.name} says")
        return torch.full((len(batch.token_ids),), self.number)

    get_values = get_logprobs = of_tokens

    def get_reference_logprobs(self, batch: SequenceBatch) -> Tensor:
        self.log.append("reference says")
        return torch.full((len(batch.token_ids),), self.number - 0.25)

    def train(self, batch: SequenceBatch, loss_fn: LossFunction) -> TrainResult:
        self.log.append(f"{self.name} learns")
        self.batches.append(batch)
        counts = GlobalCounts.of(batch)
        numbers = torch.full((1, len(batch.token_ids)), self.number)
        _, metrics = loss_fn(numbers, {name: values[None] for name, values in batch.tokens.items()}, counts)
        found = {name: float(value) for name, value in metrics.items()}
        return TrainResult(loss=found.pop("loss"), grad_norm=1.0, learning_rate=0.1, metrics=found)


def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[Any, list[str]]:
    config = compose_config(["+exp=quickstart_ppo", "ppo.num_prompts_per_step=3", *overrides])
    log: list[str] = []
    run = SimpleNamespace(
        config=config,
        state=default_grpo_save_state(),
        policy=FakeModel("policy", -0.5, log),
        value=FakeModel("value", 0.25, log),
        loss_fn=ClippedPGLossFn(config.loss_fn),
        value_loss_fn=MseValueLossFn(config.value_loss_fn),
        logger=SimpleNamespace(run_dir=tmp_path),
        transport=SimpleNamespace(
            publish=lambda version: log.append(f"version {version}") or SimpleNamespace(bytes_sent=8)
        ),
    )
    trajectories = make_trajectories()
    monkeypatch.setattr(step, "sample_step", lambda *_: StepSamples(trajectories, trajectories))
    return run, log


def test_the_value_model_speaks_before_anything_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, log = make_run(tmp_path, monkeypatch, "ppo.policy_training_start_step=0", "ppo.ppo_epochs=2")
    report = ppo.ppo_step(run, iter([]))
    assert report is not None
    assert log == ["policy says", "value says", *["value learns"] * 2, *["policy learns"] * 2, "version 1"]
    given = run.value.batches[0].tokens
    assert given.keys() == {"loss_mask", "values", "returns"}
    assert (given["values"] == 0.25).all()
    # Values are 1/4 throughout; the rewards, at their last tokens, are 1, 0 and 1/2 and there is no discount.
    assert given["returns"].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0.5, 0.5]
    assert report.metrics["return_mean"] == pytest.approx(4 / 6)
    assert report.metrics["value_mean"] == pytest.approx(0.25)
    assert report.metrics["explained_variance"] == pytest.approx(0.0, abs=1e-6), "a constant explains nothing"
    assert {"value_loss", "value_grad_norm", "value_learning_rate", "value_clip_fraction"} <= report.metrics.keys()
    assert report.metrics["optimizer_steps"] == 2
    assert undocumented(report.metrics) == set()


def test_the_policy_waits_for_the_value_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, log = make_run(tmp_path, monkeypatch, "ppo.policy_training_start_step=2")
    for number in (1, 2, 3):
        log.clear()
        report = ppo.ppo_step(run, iter([]))
        assert report is not None
        assert log == ["value says", "value learns", *["policy learns"] * (number == 3), f"version {number}"]
        assert report.metrics["optimizer_steps"] == (number == 3)
        assert ("loss" in report.metrics) == (number == 3)
        assert (report.throughput["train_tflops_per_device"] > 0) == (number == 3)
        run.state["total_steps"] += 1


def test_without_a_penalty_the_distance_to_the_reference_is_only_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k3 at a log ratio of 0.25 throughout."""
    learning = "ppo.policy_training_start_step=0"
    run, _ = make_run(tmp_path, monkeypatch, learning)
    without = ppo.ppo_step(run, iter([]))
    run, log = make_run(tmp_path, monkeypatch, learning, "ppo.skip_reference_policy_logprobs_calculation=false")
    report = ppo.ppo_step(run, iter([]))
    assert without is not None
    assert report is not None
    assert log[:2] == ["reference says", "value says"]
    assert report.metrics["kl_penalty"] == pytest.approx(math.exp(-0.25) - 0.75, rel=1e-5)
    assert "kl_penalty" not in without.metrics
    assert report.metrics["loss"] == without.metrics["loss"]


def test_values_that_are_not_finite_stop_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, log = make_run(tmp_path, monkeypatch)
    run.value.number = float("nan")
    with pytest.raises(RunError, match="an entry of values is not finite"):
        ppo.ppo_step(run, iter([]))
    assert "policy learns" not in log
    assert (tmp_path / "non_finite_step_1.json").exists()


def test_advantages_that_are_not_finite_stop_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that float32 can hold, and whose distance to the reward it cannot."""
    run, log = make_run(tmp_path, monkeypatch, "ppo.adv_estimator.normalize_advantages=false")
    run.value.number = 3e38
    trajectories = make_trajectories()
    trajectories[1].reward = -3e38
    monkeypatch.setattr(step, "sample_step", lambda *_: StepSamples(trajectories, trajectories))
    with pytest.raises(RunError, match=r"an entry of advantages is not finite for 1 response\(s\) to prompt\(s\) 1"):
        ppo.ppo_step(run, iter([]))
    assert log == ["value says"]


def test_a_gradient_of_the_value_model_that_is_not_finite_names_its_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, log = make_run(tmp_path, monkeypatch)

    def fail(*_: Any) -> TrainResult:
        raise NonFiniteGradientError(float("inf"), [2])

    run.value.train = fail
    with pytest.raises(
        RunError, match=r"the value model's gradient is not finite for 1 response\(s\) to prompt\(s\) 2"
    ):
        ppo.ppo_step(run, iter([]))
    assert "policy learns" not in log


def test_without_prompts_there_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, log = make_run(tmp_path, monkeypatch)
    monkeypatch.setattr(step, "sample_step", lambda *_: None)
    assert ppo.ppo_step(run, iter([])) is None
    assert log == []
