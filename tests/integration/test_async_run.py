"""Whole asynchronous runs: what they report, and that a kill at any moment loses and repeats no prompt."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from megatron_grpo.preflight.load import compose_config
from megatron_grpo.prepare.models import prepare
from tests.integration.runs import TrainingRun, read_jsonl, without_timing
from tests.integration.test_user_formulas import (
    FUNCTIONS,
    call,
    expect_recorded_functions,
    remove_functions,
    write_functions,
)
from tests.integration.whole_runs import complete, read_options
from tests.support.documents import undocumented

OPTIONS = read_options("async_run")

PROMPTS, STEPS = 16, 6
SHORT = (
    f"grpo.max_num_steps={STEPS}",
    f"grpo.num_prompts_per_step={PROMPTS}",
    "grpo.val_period=3",
    "grpo.max_val_samples=64",
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=null",
)
OVERSAMPLED = ("grpo.async_grpo.oversampling_factor=1.5", "grpo.async_grpo.max_trajectory_age_steps=2")
OF_ASYNC = ("trajectory_", "buffer_", "exposed_generation_s")


def async_run(run_dir: Path, *overrides: str, folder: Path | None = None) -> TrainingRun:
    return TrainingRun(run_dir, *SHORT, *overrides, recipe="quickstart_async", folder=folder)


def prompts_of(run: TrainingRun) -> list[list[int]]:
    """Rows of the prompts that each step was trained on, in their order."""
    return [list(dict.fromkeys(row["prompt_idx"] for row in run.rollouts(step))) for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Six steps without interruption, by functions of the user's folder, which are gone from there afterwards."""
    folder = tmp_path_factory.mktemp("straight")
    write_functions(folder)
    run = complete(async_run(folder / "run", *FUNCTIONS, "logger.replay_every=2", folder=folder))
    run.assert_nothing_left()
    remove_functions(folder)
    return run


def test_what_an_asynchronous_run_reports(straight: TrainingRun) -> None:
    rows = straight.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    names = {name for name in rows[0] if not name.startswith("dppo/")} - {"step", "timing", "throughput"}
    assert undocumented(names) == set()
    assert [row["trajectory_age_max"] for row in rows][:2] == [0, 1]
    assert all(row["trajectory_age_max"] <= 1 for row in rows)
    assert all(1 <= row["trajectory_versions"] <= row["trajectory_versions_max"] <= 2 for row in rows)
    assert [row["buffer_depth"] + row["buffer_in_flight"] for row in rows] == [PROMPTS] * (STEPS - 1) + [0]
    assert all(0 <= row["exposed_generation_s"] <= row["timing"]["total"] for row in rows)
    assert [row["step"] for row in read_jsonl(straight.run_dir / "validation.jsonl")] == [0, 3, 6]
    for step, row in enumerate(rows, start=1):
        versions = {span[2] for rollout in straight.rollouts(step) for span in rollout["spans"]}
        assert versions <= {step - 2, step - 1}
        assert row["weight_version"] == max(versions)
    sampled = [row for step in prompts_of(straight) for row in step]
    assert len(sampled) == len(set(sampled)) == PROMPTS * STEPS


def test_functions_of_the_users_folder_train_and_replay_without_it(straight: TrainingRun, tmp_path: Path) -> None:
    expect_recorded_functions(straight.run_dir)
    assert [round(row["dppo/high"], 6) for row in straight.metrics()] == [0.3] * STEPS
    assert "replayed" in call(tmp_path, "replay", str(straight.run_dir), "step=2", "device=cpu", "trust_run=true")


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_and_repeats_no_prompt(straight: TrainingRun, tmp_path: Path) -> None:
    for moment in (0.1, 1.0, 2.2, 2.8, 3.5, 5.2):
        kill_at(async_run(tmp_path / "run"), moment)
    last = complete(async_run(tmp_path / "run"), 600)
    assert prompts_of(last) == prompts_of(straight)
    assert [row["step"] for row in last.metrics()] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_oversampling_trains_on_every_prompt_once_whatever_is_killed(tmp_path: Path) -> None:
    """Data for the steps and no more: a prompt that is lost or repeated is missing or left over."""
    settings = [f"data.train_path={some_rows(tmp_path / 'train.jsonl', PROMPTS * STEPS)}", "grpo.max_num_epochs=1"]
    settings += ["generation.temperature=2", "generation.max_new_tokens=40", "policy.max_total_sequence_length=64"]
    for moment in (0.1, 1.0, 2.2, 3.5, 5.2):
        kill_at(async_run(tmp_path / "run", *OVERSAMPLED, *settings), moment)
    last = complete(async_run(tmp_path / "run", *OVERSAMPLED, *settings), 600)
    assert sorted(row for step in prompts_of(last) for row in step) == list(range(PROMPTS * STEPS))
    rows = last.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert undocumented(name for name in rows[0] if name not in ("step", "timing", "throughput")) == set()
    assert all(row["trajectory_age_max"] <= 2 for row in rows)
    assert all(row["oversampling_resumed"] <= PROMPTS for row in rows)
    assert sum(row["oversampling_left_over"] for row in rows) > 0
    assert rows[-1]["buffer_depth"] + rows[-1]["buffer_in_flight"] == 0


@pytest.mark.slow
def test_on_shared_devices_responses_wait_while_the_models_train(tmp_path: Path) -> None:
    """And go on with new weights; a kill loses no prompt there, too."""
    settings = [f"data.train_path={some_rows(tmp_path / 'train.jsonl', PROMPTS * STEPS)}", "grpo.max_num_epochs=1"]
    settings += ["generation.temperature=2", "generation.max_new_tokens=40", "policy.max_total_sequence_length=64"]
    settings += ["generation.placement=colocated"]
    kill_at(async_run(tmp_path / "run", *OVERSAMPLED, *settings), 2.5)
    last = complete(async_run(tmp_path / "run", *OVERSAMPLED, *settings), 600)
    last.assert_nothing_left()
    assert sorted(row for step in prompts_of(last) for row in step) == list(range(PROMPTS * STEPS))
    rows = last.metrics()
    assert all({"sleep", "wake", "offload", "onload"} <= row["timing"].keys() for row in rows)
    assert sum(row["oversampling_left_over"] for row in rows) > 0
    assert max(row["trajectory_versions_max"] for row in rows) > 1, "a response went on under later weights"
    assert all(row["trajectory_age_max"] <= 2 for row in rows)


def some_rows(file: Path, number: int) -> Path:
    """The first rows of the recipe's training data."""
    folder = Path(compose_config(["+exp=quickstart", "run_dir=unused"]).prepare.folder)
    prepare("addition", folder)
    lines = (folder / "train.jsonl").read_text().splitlines()
    file.write_text("\n".join(lines[:number]) + "\n")
    return file


def kill_at(run: TrainingRun, moment: float) -> None:
    """Let a run report whole steps, and go on for a part of the time of the last one."""
    run.start()
    steps, part = int(moment), moment % 1
    run.wait_for(partial(has_reported, run, steps))
    if part and steps:
        time.sleep(part * run.metrics()[-1]["timing"]["total"])
    run.kill()
    run.assert_nothing_left()


def has_reported(run: TrainingRun, steps: int) -> bool:
    """Whether this life of the run, or an earlier one, has reported so many steps."""
    return not steps or ((run.run_dir / "metrics.jsonl").exists() and len(run.metrics()) >= steps)


@pytest.mark.slow
def test_without_age_it_is_the_run_that_samples_and_trains_in_turn(tmp_path: Path) -> None:
    """To the last digit: the same step, the same seeds, the same order."""
    correction = "loss_fn.use_importance_sampling_correction=true"
    truncation = ["loss_fn.truncated_importance_sampling_type=tis", "loss_fn.truncated_importance_sampling_ratio=2"]
    in_turn = complete(TrainingRun(tmp_path / "in_turn", *SHORT, correction, *truncation))
    ahead = complete(async_run(tmp_path / "ahead", "grpo.async_grpo.max_trajectory_age_steps=0"))
    rows = [
        {name: value for name, value in row.items() if not name.startswith(OF_ASYNC)}
        for row in without_timing(ahead.metrics())
    ]
    assert rows == without_timing(in_turn.metrics())


@pytest.mark.slow
def test_dynamic_sampling_two_engines_and_older_trajectories(straight: TrainingRun, tmp_path: Path) -> None:
    """With a kept cache; and early stopping after the validation of the third step, with prompts still under way."""
    run = complete(async_run(tmp_path / "run", *OPTIONS["dynamic_sampling_two_engines_and_older_trajectories"]))
    run.assert_nothing_left()
    rows = run.metrics()
    assert len(rows) == 3
    assert 1 <= max(row["trajectory_age_max"] for row in rows) <= 3
    sampled = [prompt for step in (1, 2, 3) for prompt in {row["prompt_idx"] for row in run.rollouts(step)}]
    assert len(sampled) == len(set(sampled)) == PROMPTS * 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], OVERSAMPLED], ids=["in order", "oversampled"])
def test_ppo_samples_ahead_too(options: Sequence[str], tmp_path: Path) -> None:
    run = complete(
        TrainingRun(
            tmp_path / "run",
            *(option.replace("grpo.", "ppo.", 1) for option in options),
            *OPTIONS["ppo_samples_ahead_too"],
            recipe="quickstart_ppo",
        )
    )
    rows = run.metrics()
    ages = [row["trajectory_age_max"] for row in rows]
    assert ages[0] == 0
    assert 1 <= max(ages) <= (2 if options else 1)
    assert all(row["value_grad_norm"] > 0 for row in rows)
