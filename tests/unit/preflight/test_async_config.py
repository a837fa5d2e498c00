"""What is refused, remarked on and taken of sampling ahead, before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.algorithms.grpo import async_grpo_train
from megatron_grpo.config.metric_names import list_step_metrics
from megatron_grpo.preflight.load import compose_config, summarize_run
from megatron_grpo.preflight.remarks import find_remarks
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import make_run
from tests.support.grpo_run import SHAPE


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


def test_a_run_that_was_set_up_to_sample_in_turn_is_not_trained_asynchronously(tmp_path: Path) -> None:
    config = compose_config(["+exp=quickstart"])
    run = make_run(config, tmp_path, FakeRollouts(), SHAPE, [])
    with pytest.raises(ValueError, match=r"set it up with grpo\.async_grpo\.enabled=true"):
        async_grpo_train(run)


def test_oversampling_has_metrics_of_its_own() -> None:
    config = compose_config(["+exp=quickstart_async", "grpo.async_grpo.oversampling_factor=1.5"])
    assert list(find_remarks(config)) == []
    assert "oversampling_resumed" in list_step_metrics(config)
    assert "oversampling_resumed" not in list_step_metrics(compose_config(["+exp=quickstart_async"]))
