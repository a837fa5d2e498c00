"""Checkpoints beside training: when they become complete, and what a failed one leaves."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import CheckpointingConfig
from megatron_grpo.observability.file_digests import FileRecords, record_file
from megatron_grpo.run.checkpoint_files import verify_checkpoint
from megatron_grpo.run.checkpoints import Checkpointer


class FakeModel:
    """Writes its file when it is told that it is done."""

    def __init__(self) -> None:
        self.written = False
        self.error: RunError | None = None
        self.folder: Path | None = None

    def save_checkpoint(self, folder: str, *, background: bool) -> FileRecords:
        assert background
        self.folder = Path(folder)
        return {}

    def is_checkpoint_written(self) -> bool:
        return self.written

    def finish_checkpoint(self) -> FileRecords:
        assert self.folder is not None
        if self.error is not None:
            raise self.error
        (self.folder / "weights").write_text(self.folder.name)
        return {"weights": record_file(self.folder / "weights")}


class FakeRun:
    def __init__(self, folder: Path) -> None:
        self.model, self.notes = FakeModel(), list[str]()
        self.checkpointer = Checkpointer(folder, CheckpointingConfig(async_save=True, keep_top_k=1))
        self.checkpointer.note = self.notes.append

    def begin(self, step: int) -> None:
        state = {"save_state": {"total_steps": step}, "metrics": {"val_accuracy": 0.5}}
        models: Any = {"megatron": self.model}
        self.checkpointer.begin(step, state, {"position": step}, models, background=True)

    def settle(self) -> None:
        """Look after it until it is complete."""
        assert self.checkpointer.pending is not None
        while self.checkpointer.pending is not None:
            self.checkpointer.advance()


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return FakeRun(tmp_path)


def test_it_is_complete_once_ranks_have_written_and_all_is_digested(run: FakeRun) -> None:
    run.begin(1)
    for _ in range(3):
        run.checkpointer.advance()
    assert run.checkpointer.list_steps() == []
    run.model.written = True
    run.settle()
    assert run.checkpointer.list_steps() == [1]
    assert verify_checkpoint(run.checkpointer.locate(1)) is None
    assert "saved" in run.notes[-1]


def test_the_next_save_waits_for_it_and_old_ones_go(run: FakeRun) -> None:
    run.begin(1)
    run.begin(2)
    assert run.checkpointer.list_steps() == [1]
    run.checkpointer.finish()
    assert run.checkpointer.list_steps() == [2]  # keep_top_k
    run.checkpointer.finish()  # nothing to do


def test_a_failed_one_is_told_and_given_up(run: FakeRun) -> None:
    run.begin(1)
    run.checkpointer.finish()
    run.begin(2)
    run.model.error = RunError("rank 1: disk full")
    with pytest.raises(RunError, match="disk full"):
        run.checkpointer.finish()
    assert run.checkpointer.pending is None
    assert run.checkpointer.list_steps() == [1]
    assert run.checkpointer.find_start() == run.checkpointer.locate(1)


def test_a_kill_at_any_moment_leaves_the_one_before(run: FakeRun, tmp_path: Path) -> None:
    """What a new process finds of a checkpoint that was begun, and of one whose ranks had written."""
    run.begin(1)
    run.checkpointer.finish()
    run.begin(2)
    run.checkpointer.advance()
    assert run.checkpointer.pending is not None
    (run.checkpointer.pending.folder / "megatron" / "weights").write_text("written by ranks, and recorded by nobody")
    again = Checkpointer(tmp_path, replace(run.checkpointer.config))
    assert again.find_start() == again.locate(1)
    (leftover,) = again.folder.glob(".writing_*")
    assert leftover.name.startswith(f".writing_step_2_{os.getpid()}_")
    again.remove_leftovers()
    assert [path.name for path in again.folder.iterdir()] == ["step_1"]
