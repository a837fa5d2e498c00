"""Half runs for real: what trains on a recording is the recorded run to the last digit, and sampling needs no rank."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_grpo.batch.rollout_files import locate_rollouts_file
from tests.integration.runs import TrainingRun, read_jsonl, without_timing
from tests.integration.whole_runs import complete, kill_after, read_options

OPTIONS = read_options("debug_modes")

TINY = ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "grpo.val_period=0")
ALONE = ("policy.parallel.pipeline=1", "generation.parallel.pipeline=1")
"""One rank and one process of an engine: the time goes into starting them."""
SHORT = (*TINY, *ALONE, "grpo.max_num_steps=3", "grpo.max_val_samples=16", "checkpointing.keep_top_k=null")
OF_REFITS = ("refit_bytes", "refit_retries", "engine_restarts")
OF_LEARNING = ("advantages", "prev_logprobs")


def replay(recorded: TrainingRun, *overrides: str, name: str = "replay") -> TrainingRun:
    """A run with the settings of a recorded one, which trains on its recording."""
    recorded_overrides = [
        override for override in recorded.overrides if not override.startswith(("run_dir=", "+exp=", "logger.progress"))
    ]
    recipe = next(override for override in recorded.overrides if override.startswith("+exp=")).removeprefix("+exp=")
    source = f"debug.rollouts_from={recorded.run_dir}"
    run_dir = recorded.run_dir.with_name(name)
    return TrainingRun(run_dir, *recorded_overrides, "data.val_path=null", source, *overrides, recipe=recipe)


def read_training_metrics(run: TrainingRun) -> list[dict[str, Any]]:
    """All metrics of training: those of refits and validations are of engines."""
    rows = without_timing(run.metrics())
    return [{k: v for k, v in row.items() if k not in OF_REFITS and not k.startswith("val_")} for row in rows]


def processes(run: TrainingRun) -> set[str]:
    """Kinds of processes that a run had, by their logs."""
    return {file.stem.rstrip("0123456789_") for file in (run.run_dir / "logs").glob("*.log")}


def assert_replayed(replayed: TrainingRun, recorded: TrainingRun) -> None:
    """Every figure and every rollout is the same, and there was no engine."""
    assert read_training_metrics(replayed) == read_training_metrics(recorded)
    assert all("recording" in row["timing"] and "refit" not in row["timing"] for row in replayed.metrics())
    assert not any(set(OF_REFITS) & row.keys() for row in replayed.metrics())
    for row in recorded.metrics():
        assert replayed.rollouts(row["step"]) == recorded.rollouts(row["step"])
    assert not any("engine" in name or "environment" in name for name in processes(replayed)), processes(replayed)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Three steps that any run would make."""
    return complete(TrainingRun(tmp_path_factory.mktemp("recorded") / "run", *SHORT))


@pytest.mark.slow
def test_training_on_a_recording_is_the_recorded_run(straight_run: TrainingRun) -> None:
    run = complete(replay(straight_run))
    run.assert_nothing_left()
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert all(row["optimizer_steps"] > 0 for row in run.metrics())
    assert_replayed(run, straight_run)


@pytest.mark.slow
def test_sampling_without_training(recorded: TrainingRun) -> None:
    run = complete(
        TrainingRun(recorded.run_dir.with_name("sampled"), *SHORT, "grpo.max_num_steps=2", "debug.train=false")
    )
    run.assert_nothing_left()
    first, second = run.metrics()
    assert {row["optimizer_steps"] for row in (first, second)} == {0}
    assert "loss" not in first
    assert (first["weight_version"], second["weight_version"]) == (0, 0)
    assert first["reward"] == recorded.metrics()[0]["reward"]
    ours, theirs = run.rollouts(1), recorded.rollouts(1)
    assert [row for row in ours if any(row[name] is not None for name in OF_LEARNING)] == []
    assert ours == [row | dict.fromkeys(OF_LEARNING) for row in theirs], "the first step is that of any run"
    assert run.rollouts(2) != recorded.rollouts(2)
    validations = read_jsonl(run.run_dir / "validation.jsonl")
    assert [row["step"] for row in validations] == [0, 2]
    assert validations[0]["val_accuracy"] == validations[1]["val_accuracy"], "the weights are those of the beginning"
    assert not (run.run_dir / "checkpoints").exists()
    assert not any("rank" in name for name in processes(run)), processes(run)
    assert json.loads((run.run_dir / "summary.json").read_text())["outcome"] == "completed"


@pytest.mark.slow
def test_what_was_sampled_without_training_can_be_trained_on(recorded: TrainingRun, tmp_path: Path) -> None:
    sampled = complete(TrainingRun(tmp_path / "sampled", *SHORT, "debug.train=false", "grpo.val_at_start=false"))
    overrides = [override for override in sampled.overrides if override.startswith(("grpo.", "policy."))]
    source = f"debug.rollouts_from={sampled.run_dir / 'rollouts'}"
    run = complete(TrainingRun(tmp_path / "trained", *overrides, source, "data.val_path=null", "checkpointing=none"))
    ours, theirs = run.metrics(), sampled.metrics()
    assert [row["reward"] for row in ours] == [row["reward"] for row in theirs]
    assert read_training_metrics(run)[0] == read_training_metrics(recorded)[0], "the first step is on policy"
    assert [row["weight_version"] for row in ours] == [0, 0, 0]


@pytest.mark.slow
def test_a_run_goes_on_where_its_recording_ends(recorded: TrainingRun, tmp_path: Path) -> None:
    """With engines again, from the checkpoint that the recorded run would have written: its last step, once more."""
    first_two = tmp_path / "first_two"
    for step in (1, 2):
        locate_rollouts_file(first_two, step).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(locate_rollouts_file(recorded.run_dir, step), locate_rollouts_file(first_two, step))
    begun = complete(replay(recorded, f"debug.rollouts_from={first_two}", name="continued"))
    assert f"the recording is used up: {first_two} ends with step 2" in begun.log()
    assert json.loads((begun.run_dir / "summary.json").read_text())["outcome"] == "data_used_up"
    assert read_training_metrics(begun) == read_training_metrics(recorded)[:2]
    run = complete(TrainingRun(begun.run_dir, *SHORT))
    assert "resumed after step 2" in run.log()
    assert read_training_metrics(run) == read_training_metrics(recorded)
    assert run.rollouts(3) == recorded.rollouts(3)


@pytest.mark.slow
def test_a_replay_that_was_killed_resumes(recorded: TrainingRun) -> None:
    kill_after(replay(recorded, "checkpointing.save_period=1", name="killed"), 1)
    second = complete(replay(recorded, "checkpointing.save_period=1", name="killed"))
    assert_replayed(second, recorded)


@pytest.mark.slow
def test_dynamic_sampling_and_every_option_of_a_step(tmp_path: Path) -> None:
    """Groups that were dropped, several optimizer steps, a reference that moves, rewards scaled and shaped."""
    options = OPTIONS["dynamic_sampling_and_every_option_of_a_step"]
    first = complete(TrainingRun(tmp_path / "run", *SHORT, *options))
    assert sum(row["dynamic_sampling_groups_without_signal"] for row in first.metrics()) > 0
    second = complete(replay(first))
    assert_replayed(second, first)


@pytest.mark.slow
def test_ppo_trains_on_a_recording_too(tmp_path: Path) -> None:
    sizes = OPTIONS["ppo_trains_on_a_recording_too"]
    first = complete(TrainingRun(tmp_path / "run", *sizes, recipe="quickstart_ppo"))
    second = complete(replay(first))
    assert [row["optimizer_steps"] for row in second.metrics()] == [0, 1, 1]
    assert all(np.isfinite(row["value_loss"]) for row in second.metrics())
    assert_replayed(second, first)


@pytest.mark.slow
def test_the_recording_of_an_asynchronous_run_teaches_the_same(tmp_path: Path) -> None:
    """Samples of older weights, and of several in one response, step by step as that run took them."""
    first = complete(TrainingRun(tmp_path / "run", *SHORT, recipe="quickstart_async"))
    assert any(row["trajectory_age"] > 0 for row in first.metrics()), first.metrics()
    second = complete(replay(first, "grpo.async_grpo.enabled=false"))
    ours, theirs = read_training_metrics(second), read_training_metrics(first)
    assert len(ours) == len(theirs) == 3
    for our, their in zip(ours, theirs, strict=True):
        assert {"loss", "grad_norm", "reward", "approx_entropy", "gen_kl_error"} <= our.keys()
        assert our == {name: value for name, value in their.items() if name in our}
    assert [second.rollouts(step) for step in (1, 2, 3)] == [first.rollouts(step) for step in (1, 2, 3)]


@pytest.mark.slow
def test_another_loss_on_the_same_rollouts(recorded: TrainingRun) -> None:
    run = complete(replay(recorded, "checkpointing=none", "loss_fn.token_level_loss=false", name="other_loss"))
    ours, theirs = read_training_metrics(run), read_training_metrics(recorded)
    assert [row["reward"] for row in ours] == [row["reward"] for row in theirs]
    assert ours[1]["grad_norm"] != theirs[1]["grad_norm"]


def test_mistakes_are_told_before_anything_starts(straight_run: TrainingRun, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(straight_run.run_dir / "rollouts", broken)
    (broken / "step_2.parquet").write_bytes((broken / "step_2.parquet").read_bytes()[:-20])
    run = replay(straight_run, f"debug.rollouts_from={broken}", name="refused")
    assert run.finish() == 2, run.log()
    assert f"debug.rollouts_from={broken}" in run.log()
    assert "is damaged or was not written to its end" in run.log()
    assert "Traceback" not in run.log()
    assert not run.run_dir.exists()
