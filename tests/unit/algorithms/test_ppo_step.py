"""The order of a PPO step, what each model is given, and that the policy waits while the value model warms up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.algorithms import ppo
from megatron_grpo.algorithms.step_report import StepReport
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.errors import RunError
from megatron_grpo.models.source import find_model_shape
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.trainer.model_ranks import NonFiniteGradientError, TrainResult
from tests.support.documents import undocumented
from tests.support.fake_rollouts import FakeRay, FakeRollouts
from tests.support.fake_run import make_run as make_fake_run
from tests.support.ppo_batch import make_trajectories
from tests.support.trajectories import failed_trajectory

SHAPE = find_model_shape(compose_config(["+exp=quickstart_ppo"]))


@pytest.fixture(autouse=True)
def without_ray(fake_ray: FakeRay) -> FakeRay:
    return fake_ray


def make_run(
    tmp_path: Path, *overrides: str, respond: Callable[[], list[Trajectory]] = make_trajectories
) -> tuple[Any, list[str]]:
    """A run whose steps sample what `respond` says, and its log."""
    prompts = f"ppo.num_prompts_per_step={len(respond())}"
    config = compose_config(["+exp=quickstart_ppo", prompts, *overrides])
    log: list[str] = []
    run = make_fake_run(
        config, tmp_path, FakeRollouts(lambda *_: [[trajectory] for trajectory in respond()]), SHAPE, log
    )
    run.policy.reference_offset = -0.25
    return run, log


def prompts() -> Iterator[Any]:
    while True:
        yield [{"idx": 0}]


def step(run: Any) -> StepReport:
    report = ppo.ppo_step(run, prompts())
    assert report is not None
    return report


def test_the_value_model_speaks_before_anything_is_learned(tmp_path: Path, without_ray: FakeRay) -> None:
    run, log = make_run(tmp_path, "ppo.policy_training_start_step=0", "ppo.ppo_epochs=2")
    report = step(run)
    learns = [*["policy learns"] * 2, *["value learns"] * 2]
    assert log == ["policy says", "value says", "dump 1 begins", *learns, "version 1"]
    lesson = run.value.lessons[0]
    assert lesson.tokens.fields.as_dict().keys() == {"sampled", "loss_mask", "values", "returns"}
    assert (lesson.tokens.fields.values == 0.25).all()
    # Values are 1/4 throughout; the rewards, at their last tokens, are 1, 0 and 1/2 and there is no discount.
    assert lesson.entry("returns") == [[0, 0, 1, 1, 1], [0, 0, 0], [0, 0, 0.5, 0.5]]
    assert report.metrics["return_mean"] == pytest.approx(4 / 6)
    assert report.metrics["value_mean"] == pytest.approx(0.25)
    assert report.metrics["explained_variance"] == pytest.approx(0.0, abs=1e-6), "a constant explains nothing"
    assert {"value_loss", "value_grad_norm", "value_learning_rate", "value_clip_fraction"} <= report.metrics.keys()
    assert report.metrics["optimizer_steps"] == 2
    assert undocumented(report.metrics) == set()
    assert without_ray.gets == 0, "no token comes to the driver"


def test_the_policy_waits_for_the_value_model(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, "ppo.policy_training_start_step=2")
    for number in (1, 2, 3):
        log.clear()
        report = step(run)
        learns = [*["policy learns"] * (number == 3), "value learns"]
        assert log == ["value says", f"dump {number} begins", *learns, f"version {number}"]
        assert report.metrics["optimizer_steps"] == (number == 3)
        assert ("loss" in report.metrics) == (number == 3)
        assert (report.throughput["train_tflops_per_device"] > 0) == (number == 3)
        run.state["total_steps"] += 1


def test_without_a_penalty_the_distance_to_the_reference_is_only_reported(tmp_path: Path) -> None:
    """k3 at a log ratio of 0.25 throughout."""
    learning = "ppo.policy_training_start_step=0"
    run, _ = make_run(tmp_path, learning)
    without = step(run)
    run, log = make_run(tmp_path, learning, "ppo.skip_reference_policy_logprobs_calculation=false")
    report = step(run)
    assert log[:2] == ["reference says", "value says"]
    assert report.metrics["kl_penalty"] == pytest.approx(math.exp(-0.25) - 0.75, rel=1e-5)
    assert "kl_penalty" not in without.metrics
    assert report.metrics["loss"] == without.metrics["loss"]


def test_values_that_are_not_finite_stop_the_step(tmp_path: Path) -> None:
    run, log = make_run(tmp_path)
    run.value.number = float("nan")
    with pytest.raises(RunError, match="a value of values is not finite"):
        step(run)
    assert log == ["value says"]
    assert [step for step, _, _ in run.dumps.held] == [1], "its rollouts are written without advantages"
    written = json.loads((tmp_path / "non_finite_step_1.json").read_text())
    assert written["values"] == [["NaN"] * length for length in (5, 3, 4)]


def test_values_need_not_be_finite_where_there_is_no_loss(tmp_path: Path) -> None:
    """The advantages of the others are normalised without them."""
    run, _ = make_run(tmp_path, "ppo.overlong_filtering=true")
    add_field = run.value.add_field

    def one_is_not(batch: Any, field: str) -> Any:
        return add_field(batch, field) & [True, False, True]

    run.value.add_field = one_is_not
    assert math.isfinite(step(run).metrics["value_loss"])


@pytest.mark.parametrize("in_loss", [True, False])
def test_advantages_that_are_not_finite_stop_the_step(in_loss: bool, tmp_path: Path) -> None:
    """A value that float32 can hold, and whose distance to the reward it cannot; unless the loss leaves it out."""

    def respond() -> list[Trajectory]:
        trajectories = make_trajectories()
        trajectories[1].reward = -3e38
        return trajectories

    options = ["ppo.adv_estimator.normalize_advantages=false", f"ppo.overlong_filtering={not in_loss}"]
    run, log = make_run(tmp_path, *options, respond=respond)
    run.value.number = 3e38
    if not in_loss:  # the second response was cut off
        assert step(run).metrics["valid_tokens"] == 5
        return
    with pytest.raises(RunError, match=r"a value of advantages is not finite for 1 response\(s\) to prompt\(s\) 1"):
        step(run)
    assert log == ["value says"]
    written = json.loads((tmp_path / "non_finite_step_1.json").read_text())
    assert written["advantages"] == [[0.0, 0.0, "-Infinity"]]


def test_a_gradient_of_the_value_model_that_is_not_finite_names_its_prompts(tmp_path: Path) -> None:
    run, log = make_run(tmp_path)

    def fail(*_: Any) -> TrainResult:
        raise NonFiniteGradientError(float("inf"), [2])

    run.value.train = fail
    with pytest.raises(
        RunError, match=r"the value model's gradient is not finite for 1 response\(s\) to prompt\(s\) 2"
    ):
        step(run)
    assert "policy learns" not in log


def test_without_prompts_there_is_no_step(tmp_path: Path) -> None:
    run, log = make_run(tmp_path)
    assert ppo.ppo_step(run, iter([])) is None
    assert log == []


@pytest.mark.parametrize("replicas", [(1, 1), (3, 1), (1, 3), (2, 3), (2, 6), (6, 2)], ids=str)
def test_the_layouts_change_no_figure(replicas: tuple[int, int], tmp_path: Path) -> None:
    """Policy and value model have the lessons of one process, on minibatches of their own."""
    options = [
        "ppo.policy_training_start_step=0",
        "ppo.skip_reference_policy_logprobs_calculation=false",
        "policy.train_global_batch_samples=6",
    ]
    figures = []
    for policy, value in ((1, 1), replicas):
        layouts = [f"policy.parallel.data={policy}", f"value.parallel.data={value}"]
        run, _ = make_run(tmp_path, *options, *layouts, respond=lambda: 2 * (make_trajectories() + make_trajectories()))
        metrics = step(run).metrics
        lessons = [
            (lesson.sequences, {name: lesson.entry(name) for name in lesson.tokens.fields.as_dict()})
            for lesson in run.value.lessons + run.policy.lessons
        ]
        figures.append((metrics, lessons))
    assert figures[0] == figures[1]


@pytest.mark.parametrize("kl", [True, False])
def test_a_rollout_that_failed_touches_nothing_else(kl: bool, tmp_path: Path) -> None:
    """The others get the values, advantages and returns that they get without it, to the last digit."""
    values = {"values": 0.25, "reference_logprobs": -0.25}  # of the prompt, which is all there is
    penalty = ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1"] if kl else []
    settings = ["ppo.skip_reference_policy_logprobs_calculation=false", "ppo.seq_logprob_error_threshold=1.5", *penalty]
    options = ["ppo.policy_training_start_step=0", *settings]

    def with_failures() -> list[Trajectory]:
        failed = failed_trajectory(prompt_tokens=4, prompt_idx=3)
        return [failed, *make_trajectories()[:2], failed, *make_trajectories()[2:]]

    run, _ = make_run(tmp_path, *options)
    without = step(run)
    beside, _ = make_run(tmp_path, *options, respond=with_failures)
    report = step(beside)
    for model, peer in ((run.value, beside.value), (run.policy, beside.policy)):
        (expected,), (lesson,) = model.lessons, peer.lessons
        for name in expected.tokens.fields.as_dict():
            rows = lesson.entry(name)
            assert [rows[number] for number in (1, 2, 4)] == expected.entry(name), name
            assert [rows[number] for number in (0, 3)] == [[values.get(name, 0)] * 4] * 2, name
    for name in ("loss", "value_loss", "valid_tokens", "reward", "num_masked_seqs", "explained_variance", "kl_penalty"):
        assert report.metrics[name] == pytest.approx(without.metrics[name], rel=1e-6, abs=1e-5), name
    assert report.metrics["failed_rollouts"] == 2
    assert all(map(math.isfinite, report.metrics.values()))
