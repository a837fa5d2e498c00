"""What half a run cannot do is refused, with what to do about it; so are recordings that do not fit the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.batch.rollout_files import StepRecord, locate_rollouts_file, write_rollouts
from megatron_grpo.config.schema import Config
from megatron_grpo.models.source import compute_vocabulary_digest
from megatron_grpo.preflight.load import check_overrides, compose_config, load_config, summarize_run
from tests.support.config_problems import problems_of
from tests.support.recorded_run import RUN, make_facts, make_record
from tests.support.trajectories import make_trajectory, with_learnt

SIZES = ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2"]


def write_step(folder: Path, step: int, record: StepRecord | None = None, *, groups: int = 2, token: int = 1) -> Path:
    file = locate_rollouts_file(folder, step)
    record = make_record(vocab=128) if record is None else record
    rows = [
        (number, with_learnt(*(make_trajectory(token_ids=[1, 2, token], group=number, sample=i) for i in (0, 1))))
        for number in range(groups)
    ]
    write_rollouts(file, rows, record.to_metadata())
    return file


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Of a run of three steps."""
    folder = tmp_path / "recorded"
    for step in (1, 2, 3):
        write_step(folder, step)
    return folder


@pytest.fixture
def reading(model: Path, tmp_path: Path, recording: Path) -> list[str]:
    """The least that a run needs to train on it: no file of prompts is there."""
    overrides = [f"policy.model.path={model}", "data.train_path=/nowhere.jsonl", f"run_dir={tmp_path / 'run'}"]
    return [*overrides, *SIZES, f"debug.rollouts_from={recording}", "grpo.max_num_steps=3"]


def test_a_recording_is_all_that_is_needed(reading: list[str], recording: Path) -> None:
    checked = check_overrides(reading)
    assert (checked.problems, checked.remarks) == ([], [])
    assert f"rollouts of {recording}, on" in summarize_run(checked.require(), None)
    load_config([*reading, f"debug.rollouts_from={recording}/rollouts"])


def test_the_home_folder_is_found(reading: list[str], recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(recording.parent))
    config = load_config([*reading, f"debug.rollouts_from=~/{recording.name}"])
    assert config.debug.rollouts_from == str(recording)


def test_a_recording_that_is_shorter_ends_the_run(reading: list[str], recording: Path) -> None:
    (remark,) = check_overrides([*reading, "grpo.max_num_steps=7"]).remarks
    assert remark.subject == f"debug.rollouts_from={recording}"
    assert remark.text == "ends with step 3, and the run with it, before grpo.max_num_steps=7"


def test_the_steps_of_the_epochs_are_those_of_the_recorded_run(reading: list[str]) -> None:
    assert load_config([*reading, "grpo.max_num_steps=-1"]).grpo.max_num_steps == RUN.max_num_steps


@pytest.mark.parametrize(
    ("overrides", "subject", "text"),
    [
        (["debug.train=false"], "debug.train=False", "leaves nothing to do beside debug.rollouts_from="),
        (
            ["grpo.async_grpo.enabled=true"],
            "grpo.async_grpo.enabled=True",
            "samples ahead, and debug.rollouts_from starts no engine; use false",
        ),
        (
            ["data.val_path=val.jsonl", "grpo.val_at_start=false"],
            "data.val_path=val.jsonl",
            "is sampled by grpo.val_period=10 and grpo.val_at_end=True, and debug.rollouts_from starts no engine; use "
            "data.val_path=null",
        ),
        (
            ["data.val_sets.hard.path=val.jsonl", "grpo.val_period=0", "grpo.val_at_start=false"],
            "data.val_sets.hard.path=val.jsonl",
            "is sampled by grpo.val_at_end=True, and debug.rollouts_from starts no engine; use data.val_sets={}",
        ),
        (
            ["policy.moe.replay_routing=true"],
            "policy.moe.replay_routing=True",
            "needs the experts that engines chose, which recorded rollouts do not have; use false",
        ),
    ],
)
def test_what_needs_engines(reading: list[str], overrides: list[str], subject: str, text: str) -> None:
    assert text in problems_of([*reading, *overrides])[subject]


def test_validation_that_is_off_may_stay_in_the_recipe(reading: list[str]) -> None:
    off = ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"]
    compose_config([*reading, "data.val_path=val.jsonl", *off])


def test_without_training_no_checkpoint_is_ranked_and_no_gpu_of_a_policy_needed(base_overrides: list[str]) -> None:
    keys = ["checkpointing.keep_top_k=2", "checkpointing.metric_name=nothing", "cluster.gpus_per_node=1"]
    keys.append("policy.parallel.data=4")
    config = compose_config([*base_overrides, "debug.train=false", *keys, "generation.parallel.data=1"])
    assert not config.has_checkpoints
    assert "nothing is trained" in summarize_run(config, None)
    assert "checkpointing.metric_name=nothing" in problems_of([*base_overrides, *keys[:2]])


def test_without_engines_none_of_their_gpus_is_needed(reading: list[str]) -> None:
    compose_config([*reading, "cluster.gpus_per_node=1"])
    settings = [override for override in reading if not override.startswith("debug.")]
    assert "cluster.gpus_per_node=1" in problems_of([*settings, "cluster.gpus_per_node=1"])


@pytest.mark.parametrize(
    ("overrides", "subject", "text"),
    [
        (["grpo.num_prompts_per_step=4"], "grpo.num_prompts_per_step=4", "have 2; use 2"),
        (["grpo.num_generations_per_prompt=4"], "grpo.num_generations_per_prompt=4", "have 2; use 2"),
        (["grpo.use_dynamic_sampling=true"], "grpo.use_dynamic_sampling=True", "was sampled without it"),
    ],
)
def test_a_recording_of_other_settings(reading: list[str], overrides: list[str], subject: str, text: str) -> None:
    problems = problems_of([*reading, *overrides])
    assert problems.keys() == {subject}
    assert text in problems[subject]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("no folder", "no such folder; give the folder of a run that recorded its rollouts"),
        ("no file", "rollouts has no step_N.parquet; record a run with logger.rollouts=all"),
        ("a hole", "rollouts has no step_2.parquet, and later steps; put it back"),
        ("no beginning", "begins with step 3; start from the checkpoint before it, checkpointing.resume=RUN_DIR/ch"),
        ("cut off", "step_2.parquet is damaged or was not written to its end"),
        ("another version", "step_2.parquet was written by another version"),
        ("a sample", "step_2.parquet has 2 of the 4 rollouts of its step; record a run with logger.rollouts=all"),
    ],
)
def test_a_recording_that_is_not_whole(reading: list[str], recording: Path, change: str, text: str) -> None:
    files = {step: locate_rollouts_file(recording, step) for step in (1, 2, 3)}
    if change == "no folder":
        recording.rename(recording.with_name("elsewhere"))
    elif change in ("no file", "a hole", "no beginning"):
        for step in {"no file": (1, 2, 3), "a hole": (2,), "no beginning": (1, 2)}[change]:
            files[step].unlink()
    elif change == "cut off":
        files[2].write_bytes(files[2].read_bytes()[:-9])
    elif change == "another version":
        write_rollouts(files[2], [])
    else:
        write_step(recording, 2, groups=1)
    ((subject, problem),) = problems_of(reading).items()
    assert subject == f"debug.rollouts_from={recording}"
    assert text in problem


def test_steps_beyond_the_last_are_not_looked_at(reading: list[str], recording: Path) -> None:
    locate_rollouts_file(recording, 3).write_bytes(b"")
    load_config([*reading, "grpo.max_num_steps=2"])


def test_the_own_folder_is_refused(reading: list[str], recording: Path) -> None:
    ((_, text),) = problems_of([*reading, f"run_dir={recording}"]).items()
    assert "is this run's own run_dir, whose rollouts it would overwrite; choose another run_dir" in text


def test_a_sequence_that_is_too_long(reading: list[str], recording: Path) -> None:
    write_step(recording, 2, make_record(make_facts(longest=9000), vocab=128))
    limit = Config().policy.max_total_sequence_length
    ((subject, text),) = problems_of(reading).items()
    assert subject == f"policy.max_total_sequence_length={limit}"
    assert "has a sequence of 9000 tokens; use that or more" in text


def with_vocabulary(model: Path, vocabulary: dict[str, int]) -> str | None:
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return compute_vocabulary_digest(model)


@pytest.mark.parametrize(
    ("recorded", "text"),
    [
        ({"vocab": 64}, "has 128 tokens, and the model that"),
        ({"vocab": 64, "vocabulary": "same"}, None),
        ({"vocab": 128, "vocabulary": "other"}, "has another vocabulary than the model that"),
    ],
)
def test_tokens_of_another_model(
    reading: list[str], model: Path, recording: Path, recorded: dict[str, Any], text: str | None
) -> None:
    digests = {"same": with_vocabulary(model, {"a": 0, "b": 1}), "other": "0" * 32}
    facts = replace(RUN, vocab=recorded["vocab"], vocabulary=digests.get(recorded.get("vocabulary", "")))
    for step in (1, 2, 3):
        write_step(recording, step, StepRecord(facts, make_facts()))
    if text is None:
        load_config(reading)
        return
    ((subject, problem),) = problems_of(reading).items()
    assert subject == f"policy.model.path={model}"
    assert text in problem


def test_a_token_that_the_model_does_not_have(reading: list[str], model: Path, recording: Path) -> None:
    file = write_step(recording, 1, token=128)
    text = f"has 128 tokens, and {file} has token 128; name the model that was recorded"
    assert problems_of(reading) == {f"policy.model.path={model}": text}
