"""Which checkpoint a run starts from, which it keeps, and when two runs would mix."""

import math
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import CheckpointingConfig, Config, DataConfig, LoggerConfig
from megatron_grpo.run.checkpoint_files import read_loader_state, read_state
from megatron_grpo.run.checkpoints import Checkpointer, resolve_checkpoint
from megatron_grpo.run.directory import record_start
from tests.support.checkpoints import fake_models


def state_of(step: int, score: float | None) -> dict[str, Any]:
    return {"save_state": {"total_steps": step}, "metrics": {} if score is None else {"val_accuracy": score}}


def save_steps(run_dir: Path, scores: dict[int, float | None], **settings: object) -> Checkpointer:
    """A run that has saved these steps, each with this validation accuracy."""
    checkpointer = Checkpointer(run_dir, CheckpointingConfig(**settings))
    for step, score in scores.items():
        metrics = {} if score is None else {"val_accuracy": score}
        state = {"save_state": {"total_steps": step}, "metrics": metrics}
        checkpointer.begin(step, state, {"position": step}, fake_models(step, "megatron"))
        checkpointer.finish()
    return checkpointer


def resuming(run_dir: Path, resume: object) -> Path | None:
    return Checkpointer(run_dir, CheckpointingConfig(resume=str(resume))).find_start()


def test_what_was_written_is_found_whole(tmp_path: Path) -> None:
    checkpointer = save_steps(tmp_path, {2: 0.5, 10: 0.4})
    start = checkpointer.find_start()
    assert start == tmp_path / "checkpoints" / "step_10"
    assert (read_state(start), read_loader_state(start)) == (
        {"save_state": {"total_steps": 10}, "metrics": {"val_accuracy": 0.4}},
        {"position": 10},
    )
    assert (start / "megatron" / "common.pt").read_text().startswith("common.pt of step 10")


def test_a_write_that_breaks_off_leaves_no_checkpoint(tmp_path: Path) -> None:
    checkpointer = save_steps(tmp_path, {1: None})

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    model: Any = SimpleNamespace(save_checkpoint=fail)
    with pytest.raises(RunError, match=r"step_2 cannot be written: disk full"):
        checkpointer.begin(2, {}, {}, {"megatron": model})
    assert checkpointer.list_steps() == [1]
    checkpointer.remove_leftovers()
    assert [entry.name for entry in checkpointer.folder.iterdir()] == ["step_1"]


def test_a_late_validation_ranks_a_checkpoint_anew(tmp_path: Path) -> None:
    checkpointer = save_steps(tmp_path, {1: 0.3, 2: None}, keep_top_k=1)
    assert checkpointer.list_steps() == [1, 2]
    checkpointer.replace_state(2, state_of(2, 0.9))
    assert checkpointer.list_steps() == [2]
    assert (read_state(path := checkpointer.locate(2)), read_loader_state(path)) == (state_of(2, 0.9), {"position": 2})


def test_a_removal_that_breaks_off_leaves_whole_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_off(folder: Path, **_: object) -> None:
        if folder.exists():
            (folder / "state.json").unlink()
            raise KeyboardInterrupt

    checkpointer = save_steps(tmp_path, {1: 0.1, 2: 0.9}, keep_top_k=1)
    assert checkpointer.list_steps() == [2]
    monkeypatch.setattr("shutil.rmtree", broken_off)
    with pytest.raises(KeyboardInterrupt):
        save_steps(tmp_path, {3: 0.5, 4: 0.4}, keep_top_k=1)
    monkeypatch.undo()
    assert checkpointer.list_steps() == [2, 4]
    checkpointer.remove_leftovers()
    save_steps(tmp_path, {5: 0.3}, keep_top_k=1)
    assert sorted(entry.name for entry in checkpointer.folder.iterdir()) == ["step_2", "step_5"]


@pytest.mark.parametrize(("higher_is_better", "steps"), [(True, [2, 4, 5]), (False, [1, 3, 5])])
def test_the_best_and_the_newest_are_kept(tmp_path: Path, higher_is_better: bool, steps: list[int]) -> None:
    scores = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.8, 5: None}
    assert save_steps(tmp_path, scores, keep_top_k=2, higher_is_better=higher_is_better).list_steps() == steps


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_value_that_is_not_finite_ranks_last(tmp_path: Path, higher_is_better: bool) -> None:
    nan, inf = math.nan, math.inf
    scores: dict[int, float | None] = dict(enumerate([0.9, nan, 0.5, inf, 0.7, -inf, None, nan], start=1))
    checkpointer = save_steps(tmp_path, scores, higher_is_better=higher_is_better)
    finite = [1, 5, 3] if higher_is_better else [3, 5, 1]
    for seed in range(20):
        steps = random.Random(seed).sample(list(scores), len(scores))
        assert checkpointer.rank(steps) == [*finite, 8, 7, 6, 4, 2]


def test_checkpoints_that_a_replay_needs_are_kept_besides(tmp_path: Path) -> None:
    for step in range(1, 8):
        checkpointer = Checkpointer(tmp_path, CheckpointingConfig(keep_top_k=1, metric_name=None))
        checkpointer.keep_forever = LoggerConfig(replay_every=3).is_replay_start
        checkpointer.begin(step, state_of(step, None), {}, fake_models(step, "megatron"))
        checkpointer.finish()
    assert checkpointer.list_steps() == [2, 5, 7]


def test_without_a_metric_the_newest_are_kept(tmp_path: Path) -> None:
    scores = {1: 0.9, 2: 0.8, 3: 0.7, 10: None, 11: 0.1}
    assert save_steps(tmp_path, scores, keep_top_k=2, metric_name=None).list_steps() == [10, 11]


def test_a_run_that_began_from_another_goes_on_from_its_own(tmp_path: Path) -> None:
    """A job that is queued again must not fall back to where it once began."""
    first_run = save_steps(tmp_path / "other", {5: None}).locate(5)
    assert resuming(tmp_path / "new", first_run) == first_run
    new_run = save_steps(tmp_path / "new", {7: None}).locate(7)
    assert resuming(tmp_path / "new", first_run) == new_run


def test_where_another_run_began_may_be_gone(tmp_path: Path) -> None:
    new_run = save_steps(tmp_path / "new", {7: None}).locate(7)
    assert resuming(tmp_path / "new", tmp_path / "pruned" / "checkpoints" / "step_5") == new_run


def test_an_own_checkpoint_may_have_any_name(tmp_path: Path) -> None:
    best = save_steps(tmp_path, {3: None, 6: None}).folder / "best"
    best.with_name("step_3").rename(best)
    with pytest.raises(ConfigError, match="would go on after step 3"):
        resuming(tmp_path, best)


def test_the_newest_of_a_runs_own_checkpoints_may_be_named(tmp_path: Path) -> None:
    newest = save_steps(tmp_path, {3: None, 6: None}).locate(6)
    assert resuming(tmp_path, newest) == newest


@pytest.mark.parametrize("resume", ["none", "step_3"])
def test_two_runs_do_not_mix_in_a_folder(tmp_path: Path, resume: str) -> None:
    folder = save_steps(tmp_path, {3: None, 6: None}).folder
    with pytest.raises(ConfigError, match=rf"{folder} has later checkpoints, up to step 6"):
        resuming(tmp_path, resume if resume == "none" else folder / resume)


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a checkpoint: it has no state\.json"):
        resuming(tmp_path, tmp_path)
    assert resuming(tmp_path, "none") is resuming(tmp_path, "auto") is None


@pytest.mark.parametrize("error", [RuntimeError("PytorchStreamWriter failed"), RunError("rank 0 failed")], ids=repr)
def test_a_full_disk_is_told_and_the_partial_folder_removed(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = save_steps(tmp_path, {1: None})

    def fail(folder: str, **_: object) -> None:
        Path(folder, "part").write_bytes(b"0" * 100)
        raise error

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    last = re.escape(str(checkpointer.locate(1)))
    with pytest.raises(RunError, match=f"step_2 cannot be written: the disk is full; {last} is the last checkpoint"):
        checkpointer.begin(2, {}, {}, {"megatron": SimpleNamespace(save_checkpoint=fail)})  # type: ignore[dict-item]
    assert [entry.name for entry in checkpointer.folder.iterdir()] == ["step_1"]


def test_a_checkpoint_has_other_names(tmp_path: Path) -> None:
    config = Config(data=DataConfig(val_path="rows.jsonl"))
    record_start(tmp_path, config)
    checkpointer = save_steps(tmp_path, {1: 0.1, 2: 0.9, 3: 0.2})
    folder = checkpointer.folder
    assert resolve_checkpoint(folder / "best") == folder / "step_2"
    assert resolve_checkpoint(folder / "newest") == resolve_checkpoint(folder / "latest") == folder / "step_3"
    assert resolve_checkpoint(folder / "step_7") == folder / "step_7"
    config.checkpointing.higher_is_better = False
    record_start(tmp_path, config)
    assert resolve_checkpoint(folder / "best") == folder / "step_1"
    (folder / "best").mkdir()
    assert resolve_checkpoint(folder / "best") == folder / "best"
    with pytest.raises(ValueError, match=r"is not the folder of a run: it has no config.yaml"):
        resolve_checkpoint(tmp_path / "other" / "checkpoints" / "best")


def test_the_best_checkpoint_of_which_none_can_be_read(tmp_path: Path) -> None:
    record_start(tmp_path, Config(data=DataConfig(val_path="rows.jsonl")))
    folder = save_steps(tmp_path, {1: 0.1}).folder
    (folder / "step_1" / "state.json").write_text("{")
    assert resolve_checkpoint(folder / "newest") == folder / "step_1"
    with pytest.raises(ValueError, match=r"best: no checkpoint of .* has a state that can be read; name one"):
        resolve_checkpoint(folder / "best")
