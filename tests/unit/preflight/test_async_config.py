"""What is refused, remarked on and taken of sampling ahead, before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.algorithms.grpo import async_grpo_train
from megatron_grpo.config.metric_names import list_step_metrics
from megatron_grpo.preflight.load import compose_config, summarize_run
from megatron_grpo.preflight.remarks import find_remarks
from tests.support.config_problems import problems_of
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import make_run
from tests.support.grpo_run import SHAPE

ENABLED = "grpo.async_grpo.enabled"
CORRECTION = "loss_fn.use_importance_sampling_correction=true"


def test_the_recipe_and_the_algorithm() -> None:
    names = ["name=quickstart_async", "run_dir=run"]
    config = compose_config(["+exp=quickstart_async", *names])
    assert config == compose_config(["+exp=quickstart", "algorithm=async_grpo", *names])
    assert config.algorithm == "grpo"
    assert config.grpo.async_grpo.enabled
    assert config.loss_fn.use_importance_sampling_correction
    assert list(find_remarks(config)) == []
    assert "quickstart_async, asynchronous GRPO, up to 400 steps" in summarize_run(config, None)
    assert "trajectory_age" in list_step_metrics(config)
    assert "trajectory_age" not in list_step_metrics(compose_config(["+exp=quickstart"]))


def test_samples_of_earlier_weights_need_a_correction() -> None:
    problems = problems_of(["+exp=quickstart", f"{ENABLED}=true"])
    assert problems.keys() == {f"{ENABLED}=True"}
    assert "use_importance_sampling_correction=true" in problems[f"{ENABLED}=True"]
    without_age = ["+exp=quickstart", f"{ENABLED}=true", "grpo.async_grpo.max_trajectory_age_steps=0"]
    assert compose_config(without_age).grpo.async_grpo.enabled


def test_it_is_one_setting_for_grpo_and_ppo() -> None:
    problems = problems_of(["+exp=quickstart_ppo", f"{ENABLED}=true"])
    assert [name.replace("grpo.", "ppo.", 1) for name in problems] == ["ppo.async_grpo.enabled=True"]
    assert compose_config(["+exp=quickstart_ppo", f"{ENABLED}=true", CORRECTION]).ppo.async_grpo.enabled


def test_what_is_remarked_on() -> None:
    said = {
        one.subject: one.text
        for one in find_remarks(compose_config(["+exp=quickstart", f"{ENABLED}=true", CORRECTION]))
    }
    assert "puts no limit on the importance weights" in said[f"{ENABLED}=True"]
    threshold = "grpo.seq_logprob_error_threshold=1.5"
    said = {one.subject: one.text for one in find_remarks(compose_config(["+exp=quickstart_async", threshold]))}
    assert "leaves out responses" in said[threshold]
    age = "grpo.async_grpo.max_trajectory_age_steps=4"
    said = {one.subject: one.text for one in find_remarks(compose_config(["+exp=quickstart", age]))}
    assert said == {age: "changes nothing in this run: needs grpo.async_grpo.enabled=true"}


@pytest.mark.parametrize("name", ["enabled", "max_trajectory_age_steps"])
def test_the_name_that_python_has_no_place_for(name: str) -> None:
    (text,) = problems_of(["+exp=quickstart", f"grpo.async.{name}=1"]).values()
    assert text.endswith(f" is grpo.async_grpo.{name} here")


def test_a_run_that_was_set_up_to_sample_in_turn_is_not_trained_asynchronously(tmp_path: Path) -> None:
    config = compose_config(["+exp=quickstart"])
    run = make_run(config, tmp_path, FakeRollouts(), SHAPE, [])
    with pytest.raises(ValueError, match=r"set it up with grpo\.async_grpo\.enabled=true"):
        async_grpo_train(run)


@pytest.mark.parametrize(
    ("factor", "age", "text"),
    [
        (2.0, 1, "Use a factor below 2, or grpo.async_grpo.max_trajectory_age_steps=2 or more"),
        (1.5, 0, "Use grpo.async_grpo.max_trajectory_age_steps=1 or more"),
        (1.01, 1, "adds no whole prompt to the 32 of a step; give at least 1.03125"),
    ],
)
def test_a_factor_that_leaves_no_choice(factor: float, age: int, text: str) -> None:
    name = "grpo.async_grpo.oversampling_factor"
    given = ["+exp=quickstart_async", f"{name}={factor}", f"grpo.async_grpo.max_trajectory_age_steps={age}"]
    problems = problems_of(given)
    assert problems.keys() == {f"{name}={factor:g}"}
    assert problems[f"{name}={factor:g}"].endswith(text)


def test_oversampling_has_metrics_of_its_own() -> None:
    config = compose_config(["+exp=quickstart_async", "grpo.async_grpo.oversampling_factor=1.5"])
    assert list(find_remarks(config)) == []
    assert "oversampling_resumed" in list_step_metrics(config)
    assert "oversampling_resumed" not in list_step_metrics(compose_config(["+exp=quickstart_async"]))
