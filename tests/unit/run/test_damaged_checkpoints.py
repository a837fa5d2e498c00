"""Starting where the newest checkpoint is incomplete or damaged: told, set aside, and on from the one before."""

import errno
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import CheckpointingConfig
from megatron_grpo.observability.file_digests import record_file
from megatron_grpo.run import checkpoint_files
from megatron_grpo.run.checkpoint_files import leave_models_unread, read_with_checksum, write_with_checksum
from megatron_grpo.run.checkpoints import Checkpointer, read_by_ranks
from tests.support.checkpoints import save
from tests.support.damage import DAMAGES, delete, every_kill, files_of, flip


def names(checkpointer: Checkpointer) -> list[str]:
    return sorted(entry.name for entry in checkpointer.folder.iterdir())


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_one_is_named_set_aside_and_the_previous_taken(
    tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    origin = save(tmp_path / "run", 2, 4, 6)
    for name in files_of(origin.locate(6)):
        checkpointer = Checkpointer(tmp_path / "copy", CheckpointingConfig())
        shutil.copytree(origin.folder, checkpointer.folder)
        damage(checkpointer.locate(6) / name)
        assert checkpointer.find_start() == checkpointer.locate(4)
        stderr = capsys.readouterr().err
        assert str(checkpointer.locate(6) / name) in stderr
        assert "is set aside as damaged_step_6\n" in stderr
        assert f"going on from {checkpointer.locate(4)}" in stderr
        assert names(checkpointer) == ["damaged_step_6", "step_2", "step_4"]
        assert checkpointer.find_start() == checkpointer.locate(4)
        assert capsys.readouterr().err == "", "it is told once"
        shutil.rmtree(checkpointer.folder)


def test_looking_renames_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 2, 4)
    looking = Checkpointer(tmp_path, CheckpointingConfig(), look_only=True)
    flip(looking.locate(4) / "megatron" / "__0_0.distcp")
    assert looking.find_start() == looking.locate(2)
    stderr = capsys.readouterr().err
    assert f"{looking.locate(4)} would be set aside\nwould go on from {looking.locate(2)}" in stderr
    assert names(looking) == ["step_2", "step_4"]


def test_several_damaged_ones_are_all_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = save(tmp_path, 2, 4, 6)
    (checkpointer.folder / "step_99").mkdir()
    flip(checkpointer.locate(6) / "megatron" / "__0_0.distcp")
    delete(checkpointer.locate(4) / "manifest.json")
    assert checkpointer.find_start() == checkpointer.locate(2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    for line, expected in zip(
        lines, ["step_99 is empty", "step_6/megatron/__0_0.distcp", "step_4/manifest.json"], strict=False
    ):
        assert expected in line
    assert names(checkpointer) == ["damaged_step_4", "damaged_step_6", "damaged_step_99", "step_2"]


def test_what_was_set_aside_is_neither_overwritten_nor_counted_nor_deleted(tmp_path: Path) -> None:
    for _ in range(2):
        checkpointer = save(tmp_path, 2, 4)
        flip(checkpointer.locate(4) / "megatron" / "__0_0.distcp")
        assert checkpointer.find_start() == checkpointer.locate(2)
    (tmp_path / "checkpoints" / "damaged_step_4" / "mine").touch()
    checkpointer = save(tmp_path, 6, 8, keep_top_k=1, score=0.9)
    checkpointer.remove_leftovers()
    assert names(checkpointer) == ["damaged_step_4", "damaged_step_4.2", "step_8"]
    assert (tmp_path / "checkpoints" / "damaged_step_4" / "mine").exists()


def test_with_none_intact_nothing_is_begun_anew_however_often_it_is_tried(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 2, 4)
    for step in (2, 4):
        flip(checkpointer.locate(step) / "megatron" / "__0_0.distcp")
    for _ in range(2):
        with pytest.raises(ConfigError) as raised:
            checkpointer.find_start()
        message = str(raised.value)
        assert message.startswith(
            "configuration has 1 problem:\n  checkpointing.resume=auto  finds no intact checkpoint"
        )
        for text in ("step_2/megatron/__0_0.distcp", "step_4/megatron/__0_0.distcp", "another run_dir"):
            assert text in message
        assert names(checkpointer) == ["step_2", "step_4"]


def test_what_was_set_aside_earlier_keeps_a_run_from_beginning_anew(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 2, 4)
    flip(checkpointer.locate(4) / "dataloader.pt")
    checkpointer.find_start()
    shutil.rmtree(checkpointer.locate(2))
    with pytest.raises(ConfigError, match=r"will not begin anew .*damaged_step_4 was set aside"):
        checkpointer.find_start()
    elsewhere = save(tmp_path / "other", 9).locate(9)
    with pytest.raises(ConfigError, match="will not begin anew"):
        save(tmp_path, resume=str(elsewhere)).find_start()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("owner", ["own", "of another run"])
def test_a_damaged_one_that_was_asked_for_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], owner: str
) -> None:
    origin = save(tmp_path / "run", 2)
    for name in files_of(origin.locate(2)):
        folder = tmp_path / "copy" / "checkpoints"
        shutil.copytree(origin.folder, folder)
        damage(folder / "step_2" / name)
        resuming = save(tmp_path / ("copy" if owner == "own" else "new"), resume=str(folder / "step_2"))
        with pytest.raises(ConfigError, match=re.escape(f"cannot be started from: {folder / 'step_2' / name}")):
            resuming.find_start()
        assert (folder / "step_2").exists(), "what was named by hand stays where it is"
        shutil.rmtree(folder)


def test_folders_with_other_names_are_not_looked_at(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 2)
    for name in ("step_x", "step_007", "step_٣", "best_step_9", ".writing_step_8"):
        (checkpointer.folder / name).mkdir()
    assert checkpointer.find_start() == checkpointer.locate(2)


def test_a_later_version_is_not_set_aside(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 2, 4)
    file = checkpointer.locate(4) / "manifest.json"
    write_with_checksum(file, read_with_checksum(file) | {"format": 7})
    with pytest.raises(RunError, match="was written by a later version"):
        checkpointer.find_start()
    assert names(checkpointer) == ["step_2", "step_4"]


class FileReader:
    """A model whose ranks read files, and that tells which."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def record_files(self, folder: str, names: list[str]) -> dict[str, Any]:
        self.asked += names
        return {name: record_file(Path(folder, name)) for name in names}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_ranks_find_in_what_they_load_what_the_driver_left_unread(
    damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = save(tmp_path, 2, 4, 6)
    damage(checkpointer.locate(6) / "megatron" / "__0_0.distcp")
    is_seen = checkpointer.find_start(read_contents=leave_models_unread) == checkpointer.locate(4)
    assert is_seen == (damage.__name__ not in ("flip", "replace_content"))
    model: Any = FileReader()
    assert checkpointer.find_start(read_contents=read_by_ranks({"megatron": model})) == checkpointer.locate(4)
    assert set(model.asked) == {".metadata", "common.pt", "metadata.json", "__0_0.distcp"}
    assert "__0_0.distcp is" in capsys.readouterr().err
    assert names(checkpointer) == ["damaged_step_6", "step_2", "step_4"]


def test_exchanged_files_are_found_by_ranks(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 2, 4)
    newest, older = (checkpointer.locate(step) / "megatron" / "__0_0.distcp" for step in (4, 2))
    newest.write_bytes(older.read_bytes())
    assert checkpointer.find_start(read_contents=leave_models_unread) == checkpointer.locate(4)
    model: Any = FileReader()
    assert checkpointer.find_start(read_contents=read_by_ranks({"megatron": model})) == checkpointer.locate(2)


def test_what_cannot_be_read_now_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is away for a moment must not cost a run its newest steps."""
    checkpointer = save(tmp_path, 2, 4)

    def fail(path: Path, *_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path / "weights"))

    monkeypatch.setattr(checkpoint_files, "verify_checkpoint", fail)
    with pytest.raises(RunError, match=r"step_4 cannot be read: .*Input/output error.*weights"):
        checkpointer.find_start()
    assert names(checkpointer) == ["step_2", "step_4"]
    with pytest.raises(ConfigError, match=r"cannot be read: .*Input/output error"):
        save(tmp_path, resume=str(checkpointer.locate(4))).find_start()


def test_pruning_leaves_what_it_cannot_rank(tmp_path: Path) -> None:
    checkpointer = save(tmp_path, 2, 4, keep_top_k=2)
    flip(checkpointer.locate(2) / "state.json")
    save(tmp_path, 6, 8, 10, keep_top_k=2, score=0.9)
    assert names(checkpointer) == ["step_10", "step_2", "step_8"]


def test_wherever_saving_is_killed_an_intact_one_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saving step 4 over an earlier step 4, with an older one that goes when it is there."""
    save(tmp_path / "run", 2, 4)
    starts = []
    for copy in every_kill(tmp_path / "run", tmp_path, lambda run_dir: save(run_dir, 4, keep_top_k=1)):
        checkpointer = Checkpointer(copy, CheckpointingConfig())
        path = checkpointer.find_start()
        assert path is not None
        starts.append(path.name)
        assert not list(checkpointer.folder.glob("damaged_*"))
        checkpointer.remove_leftovers()
        assert set(names(checkpointer)) <= {"step_2", "step_4"}
    assert set(starts) == {"step_2", "step_4"}
    assert starts[-1] == "step_4"
    assert capsys.readouterr().err == ""


def test_wherever_setting_aside_is_killed_the_next_start_finds_the_previous_one(tmp_path: Path) -> None:
    run = save(tmp_path / "run", 2, 4, 6)
    for step in (4, 6):
        flip(run.locate(step) / "megatron" / "__0_0.distcp")
    for copy in every_kill(tmp_path / "run", tmp_path, lambda run_dir: save(run_dir).find_start()):
        checkpointer = Checkpointer(copy, CheckpointingConfig())
        assert checkpointer.find_start() == checkpointer.locate(2)
        assert names(checkpointer) == ["damaged_step_4", "damaged_step_6", "step_2"]
