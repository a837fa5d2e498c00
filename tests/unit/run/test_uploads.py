"""Complete checkpoints on their way to other storage, and when a save is due."""

import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import CheckpointingConfig
from megatron_grpo.run import checkpoints
from megatron_grpo.run.checkpoint_files import CheckpointError, verify_checkpoint
from megatron_grpo.run.checkpoints import Checkpointer
from megatron_grpo.run.uploads import explain_unusable_storage
from tests.support.checkpoints import fake_models


class Store(LocalFileSystem):
    """Files of this machine behind a store that can be slow, or break off."""

    protocol = "teststore"
    cachable = False
    open_gate = threading.Event()
    files_left = 1000
    names: list[str] = []  # noqa: RUF012  # of the files in the order in which they came

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("teststore://")

    def put_file(self, lpath: str, rpath: str, *arguments: Any, **options: Any) -> None:
        assert Store.open_gate.wait(20)
        if Store.files_left == 0:
            raise OSError("the bucket is full\nand more")
        Store.files_left -= 1
        Store.names.append(Path(rpath).name)
        super().put_file(lpath, rpath, *arguments, **options)


@pytest.fixture(autouse=True)
def store() -> Iterator[type[Store]]:
    fsspec.register_implementation("teststore", Store, clobber=True)
    Store.files_left, Store.names = 1000, []
    Store.open_gate.set()
    yield Store
    Store.open_gate.set()


class Run:
    """The saves of a run whose checkpoints are sent to a folder."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.target, self.notes = folder / "bucket" / "run", list[str]()
        config = CheckpointingConfig(upload_to=f"teststore://{self.target}", **settings)
        self.checkpointer = Checkpointer(folder / "run", config)
        self.checkpointer.note = self.checkpointer.uploads.note = self.notes.append

    def save(self, step: int, score: float = 0.5) -> None:
        state = {"save_state": {"total_steps": step}, "metrics": {"val_accuracy": score}}
        self.checkpointer.begin(step, state, {"position": step}, fake_models(step, "megatron"))
        self.checkpointer.finish()


def test_a_copy_is_a_whole_checkpoint_with_its_manifest_last(tmp_path: Path, store: type[Store]) -> None:
    run = Run(tmp_path)
    run.save(3)
    run.checkpointer.uploads.finish()
    assert verify_checkpoint(run.target / "step_3") is None
    assert store.names[-1] == "manifest.json"
    assert any("sent" in note and "step_3" in note for note in run.notes)


def test_a_copy_that_breaks_off_is_no_checkpoint(tmp_path: Path, store: type[Store]) -> None:
    run = Run(tmp_path)
    run.save(1)
    run.checkpointer.uploads.finish()
    store.files_left = 2
    run.save(1, score=0.7)  # a run that goes back writes the step anew, over its copy
    with pytest.raises(RunError, match=r"step_1 is complete, but is not at teststore.*: the bucket is full$"):
        run.checkpointer.uploads.finish()
    with pytest.raises(CheckpointError, match="missing"):
        verify_checkpoint(run.target / "step_1")
    store.files_left = 1000
    run.save(2)
    run.checkpointer.uploads.finish()  # the newest is there: nothing is lost
    assert verify_checkpoint(run.target / "step_2") is None


def test_only_the_newest_waits_and_none_is_deleted_before_it_is_sent(tmp_path: Path, store: type[Store]) -> None:
    run = Run(tmp_path, keep_top_k=1)
    store.open_gate.clear()
    run.save(1, score=0.1)
    while run.checkpointer.uploads.holds(run.checkpointer.locate(1)) is False:
        pass
    for step in (2, 3, 4):
        run.save(step, score=step / 10)
    assert run.checkpointer.list_steps() == [1, 4]  # 1 is being sent, 4 is newest and best
    store.open_gate.set()
    run.checkpointer.uploads.finish()
    assert sorted(path.name for path in run.target.iterdir()) == ["step_1", "step_4"]
    assert sum("came before its turn" in note for note in run.notes) == 2
    run.save(5, score=0.9)
    assert run.checkpointer.list_steps() == [5]


def test_a_late_copy_is_named_and_the_end_does_not_wait_longer(tmp_path: Path, store: type[Store]) -> None:
    run = Run(tmp_path, upload_timeout_s=0.3)
    store.open_gate.clear()
    run.save(1)
    with pytest.raises(RunError, match=r"step_1 is complete, but is not at .*: it was not sent in time"):
        run.checkpointer.uploads.finish()
    run.checkpointer.advance()
    (note,) = (note for note in run.notes if "takes longer" in note)
    assert "checkpointing.upload_timeout_s=0.3; training goes on" in note


def test_the_hub_gets_the_model_by_the_export_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho noise >&2\necho "export: no token" >&2\nexit 2\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    checkpointer = Checkpointer(tmp_path / "run", CheckpointingConfig(push_to_hub="team/model"))
    checkpointer.begin(1, {"save_state": {"total_steps": 1}, "metrics": {}}, {}, fake_models(1, "megatron"))
    checkpointer.finish()
    with pytest.raises(RunError, match=r"step_1 is complete, but is not at team/model: export: no token"):
        checkpointer.uploads.finish()
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith(f"-m megatron_grpo.export checkpoint={checkpointer.locate(1)} output={tmp_path}/run/")
    assert call.endswith("push_to_hub=team/model")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s4://bucket/run", "s4:// is no storage that fsspec knows"),
        ("hdfsx://a", "is no storage"),
        ("dropbox://a", "needs a package that is not installed here"),
    ],
)
def test_storage_that_cannot_be_used_is_refused_before_a_start(url: str, text: str) -> None:
    assert text in str(explain_unusable_storage(url))
    assert explain_unusable_storage("memory://a") is None


def test_a_save_is_due_by_steps_and_by_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    checkpointer = Checkpointer(tmp_path, CheckpointingConfig(save_period=10, save_minutes=5))
    assert [step for step in range(1, 25) if checkpointer.is_due(step)] == [10, 20]
    now[0] += 299
    assert not checkpointer.is_due(3)
    now[0] += 1
    assert checkpointer.is_due(3)
    checkpointer.begin(3, {"save_state": {"total_steps": 3}, "metrics": {}}, {}, fake_models(3, "megatron"))
    checkpointer.finish()
    assert not checkpointer.is_due(4)


def test_the_newest_stay_beside_the_best(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, CheckpointingConfig(keep_top_k=2, keep_newest=3))
    for step, score in enumerate((0.9, 0.1, 0.8, 0.2, 0.3, 0.4, 0.5), start=1):
        state = {"save_state": {"total_steps": step}, "metrics": {"val_accuracy": score}}
        checkpointer.begin(step, state, {}, fake_models(step, "megatron"))
        checkpointer.finish()
    assert checkpointer.list_steps() == [1, 3, 5, 6, 7]
