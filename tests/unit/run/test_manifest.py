"""Digests of a checkpoint's files: whatever differs from what was written is named."""

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event

import pytest
import xxhash

from megatron_grpo.config.errors import RunError
from megatron_grpo.observability import file_digests
from megatron_grpo.observability.file_digests import record_file
from megatron_grpo.run.checkpoint_files import (
    LOADER_FILE,
    MANIFEST_FILE,
    CheckpointError,
    read_with_checksum,
    verify_checkpoint,
    write_driver_files,
    write_with_checksum,
)
from tests.support.damage import DAMAGES, files_of, flip

STATE = {"save_state": {"total_steps": 3}, "metrics": {"loss": 0.1, "näme": float("inf")}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of several sizes, one of none, one hidden and some in a folder; the state carries its own digest."""
    folder = tmp_path / "step_3"
    (folder / "megatron" / "deeper").mkdir(parents=True)
    for name, size in {"a": 0, "megatron/.metadata": 1, "megatron/b": 5000, "megatron/deeper/c": 70_001}.items():
        (folder / name).write_bytes(os.urandom(size))
    write_driver_files(folder, 3, STATE, {"epoch": 0})
    return folder


def test_the_manifest_has_every_file_with_its_size_and_digest(folder: Path) -> None:
    written = json.loads((folder / MANIFEST_FILE).read_text())
    assert (written["format"], written["step"]) == (1, 3)
    assert written["files"] == {
        name: {
            "bytes": (folder / name).stat().st_size,
            "xxh3_128": xxhash.xxh3_128_hexdigest((folder / name).read_bytes()),
        }
        for name in files_of(folder)
        if name not in (MANIFEST_FILE, "state.json")
    }
    assert verify_checkpoint(folder) is None


def test_files_larger_than_one_read_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "_READ_BYTES", 4096)
    for size in (4095, 4096, 4097, 3 * 4096 + 1):
        (tmp_path / str(size)).write_bytes(os.urandom(size))
    write_driver_files(tmp_path, 3, STATE, {"epoch": 0})
    for name, record in json.loads((tmp_path / MANIFEST_FILE).read_text())["files"].items():
        if name == LOADER_FILE:
            continue
        assert record == {"bytes": int(name), "xxh3_128": xxhash.xxh3_128_hexdigest((tmp_path / name).read_bytes())}
        for position in (0, int(name) - 1):
            flip(tmp_path / name, position)
            with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / name} is damaged")):
                verify_checkpoint(tmp_path)
            flip(tmp_path / name, position)
    verify_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_to_any_file_is_found_and_the_file_named(folder: Path, damage: Callable[[Path], None]) -> None:
    for name in files_of(folder):
        copy = folder.with_name("copy")
        shutil.copytree(folder, copy)
        before = (copy / name).read_bytes()
        if before or damage.__name__ in ("extend", "delete", "make_a_folder_of_it"):
            damage(copy / name)
            with pytest.raises(CheckpointError, match=re.escape(str(copy / name))):
                verify_checkpoint(copy)
        shutil.rmtree(copy)


def test_no_byte_of_manifest_and_state_goes_unguarded(folder: Path) -> None:
    for name in (MANIFEST_FILE, "state.json"):
        for position in range((folder / name).stat().st_size):
            flip(folder / name, position)
            with pytest.raises(CheckpointError, match=f"{name} is damaged"):
                verify_checkpoint(folder)
            flip(folder / name, position)
    assert verify_checkpoint(folder) is None


def test_a_file_that_is_not_listed_does_no_harm(folder: Path) -> None:
    (folder / "notes.txt").write_text("the good one")
    assert verify_checkpoint(folder) is None


def test_sealed_files_are_json_and_give_back_what_was_written(tmp_path: Path) -> None:
    write_with_checksum(tmp_path / "state.json", STATE)
    assert read_with_checksum(tmp_path / "state.json") == STATE
    assert json.loads((tmp_path / "state.json").read_text())["metrics"] == STATE["metrics"]
    assert files_of(tmp_path) == ["state.json"]


def test_a_later_format_is_not_taken_for_damage(folder: Path) -> None:
    content = read_with_checksum(folder / MANIFEST_FILE) | {"format": 2}
    write_with_checksum(folder / MANIFEST_FILE, content)
    with pytest.raises(RunError, match="was written by a later version") as caught:
        verify_checkpoint(folder)
    assert not isinstance(caught.value, CheckpointError)


def test_reading_ends_when_it_is_told_to(folder: Path) -> None:
    stop = Event()
    stop.set()
    with pytest.raises(CancelledError):
        verify_checkpoint(folder, stop)


def count_read_bytes() -> int:
    """Bytes that this process has read, from disks or the system's memory."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_the_driver_reads_nothing_of_what_ranks_wrote(folder: Path) -> None:
    (folder / MANIFEST_FILE).unlink()
    weights = folder / "megatron" / "__0_0.distcp"
    weights.write_bytes(os.urandom(64 * 2**20))
    names = ["a", *(f"megatron/{name}" for name in (".metadata", "b", "deeper/c", "__0_0.distcp"))]
    records = {name: record_file(folder / name) for name in names}
    before = count_read_bytes()
    write_driver_files(folder, 3, STATE, {"epoch": 0}, records)
    assert count_read_bytes() - before < 2**20
    assert verify_checkpoint(folder) is None
    assert count_read_bytes() - before > 64 * 2**20, "this count sees what is read"


def test_a_file_of_ranks_that_the_driver_does_not_see_is_named(folder: Path) -> None:
    record = record_file(folder / "megatron" / "b")
    with pytest.raises(CheckpointError, match=r"megatron/elsewhere is missing"):
        write_driver_files(folder, 3, STATE, {}, {"megatron/elsewhere": record})
    with pytest.raises(CheckpointError, match=r"megatron/b is damaged: it has 5000 bytes, and 5001 were written"):
        write_driver_files(folder, 3, STATE, {}, {"megatron/b": record | {"bytes": 5001}})
