"""One checkpoint on disk: it verifies if nothing happened to it, and at every moment of a change to its state."""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_grpo.run.checkpoint_files import (
    LOADER_FILE,
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointError,
    read_loader_state,
    read_state,
    replace_state,
    verify_checkpoint,
    write_driver_files,
)
from tests.support.damage import DAMAGES, every_kill, extend, files_of

OLD = {"save_state": {"total_steps": 4}, "metrics": {"loss": 0.5}, "batch_cache": [[{"token_ids": [1, 2]}]]}
NEW = OLD | {"metrics": {"loss": 0.5, "val_accuracy": 0.25}}
LOADER = {"epoch": 1, "loader": {"position": 7}}


def make_checkpoint(folder: Path) -> Path:
    (folder / "megatron").mkdir(parents=True)
    for name in (".metadata", "common.pt", "metadata.json", "__0_0.distcp"):
        (folder / "megatron" / name).write_bytes(name.encode() * 50)
    write_driver_files(folder, 4, OLD, LOADER)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "step_4")


@pytest.fixture
def without_manifest(checkpoint: Path) -> Path:
    """As versions before manifests wrote it."""
    (checkpoint / MANIFEST_FILE).unlink()
    (checkpoint / STATE_FILE).write_text('{"save_state": {"total_steps": 4}, "metrics": {"loss": 0.5}}')
    return checkpoint


def test_what_was_written_is_read(checkpoint: Path) -> None:
    assert verify_checkpoint(checkpoint) is None
    assert (read_state(checkpoint), read_loader_state(checkpoint)) == (OLD, LOADER)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_to_any_file_is_found_and_the_file_named(checkpoint: Path, damage: Callable[[Path], None]) -> None:
    names = files_of(checkpoint)
    assert {MANIFEST_FILE, STATE_FILE, LOADER_FILE, "megatron/__0_0.distcp", "megatron/.metadata"} <= set(names)
    for name in names:
        copy = checkpoint.with_name("copy")
        shutil.copytree(checkpoint, copy)
        damage(copy / name)
        with pytest.raises(CheckpointError, match=re.escape(str(copy / name))):
            verify_checkpoint(copy)
        shutil.rmtree(copy)


def test_a_late_validation_keeps_the_checkpoint_sound_wherever_the_process_is_killed(
    checkpoint: Path, tmp_path: Path
) -> None:
    states = []
    for copy in every_kill(checkpoint, tmp_path, lambda folder: replace_state(folder, NEW)):
        assert verify_checkpoint(copy) is None
        states.append(read_state(copy))
    assert states[0] == OLD
    assert states[-1] == NEW
    assert all(state in (OLD, NEW) for state in states)
    assert len(states) == 3, "before the new state is begun, before it is renamed, and the end"


def test_a_checkpoint_is_complete_only_with_its_last_file(tmp_path: Path) -> None:
    """Without the rename that hides unfinished ones: the manifest alone would tell."""
    models = tmp_path / "models"
    (models / "megatron").mkdir(parents=True)
    (models / "megatron" / "weights").write_bytes(b"weights")
    (tmp_path / "killed").mkdir()
    *killed, finished = every_kill(
        models, tmp_path / "killed", lambda folder: write_driver_files(folder, 4, OLD, LOADER)
    )
    assert verify_checkpoint(finished) is None
    unfinished = [copy for copy in killed if not (copy / MANIFEST_FILE).exists()]
    assert len(unfinished) == 4, "before the state and the manifest are begun and renamed"
    for copy in unfinished:
        with pytest.raises(CheckpointError, match="is missing"):
            verify_checkpoint(copy)
    assert all(verify_checkpoint(copy) is None for copy in killed if copy not in unfinished)


def test_the_state_of_another_checkpoint_is_found(checkpoint: Path) -> None:
    replace_state(checkpoint, OLD | {"save_state": {"total_steps": 2}})
    with pytest.raises(CheckpointError, match=r"state\.json is that of another checkpoint: of step 2, not 4"):
        verify_checkpoint(checkpoint)


def test_one_that_an_earlier_version_wrote_is_taken_with_a_remark(without_manifest: Path) -> None:
    remark = verify_checkpoint(without_manifest)
    assert remark is not None
    assert f"{without_manifest} was written by an earlier version, without digests" in remark
    assert read_state(without_manifest)["metrics"] == {"loss": 0.5}


def test_one_that_an_earlier_version_wrote_may_get_a_validation(without_manifest: Path, tmp_path: Path) -> None:
    for copy in every_kill(without_manifest, tmp_path, lambda folder: replace_state(folder, NEW)):
        assert verify_checkpoint(copy) is not None
    assert read_state(copy) == NEW


@pytest.mark.parametrize(
    "damage",
    [damage for damage in DAMAGES if damage is not extend and damage.__name__ != "flip"],
    ids=lambda damage: damage.__name__,
)
@pytest.mark.parametrize("name", [STATE_FILE, LOADER_FILE])
def test_without_digests_garbage_is_found_all_the_same(
    without_manifest: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(without_manifest / name)
    with pytest.raises(CheckpointError, match=re.escape(str(without_manifest / name))):
        verify_checkpoint(without_manifest)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_without_digests_a_missing_file_is_found_all_the_same(without_manifest: Path, name: str) -> None:
    (without_manifest / "megatron" / name).unlink()
    with pytest.raises(CheckpointError, match=re.escape(f"megatron/{name} is missing")):
        verify_checkpoint(without_manifest)


@pytest.mark.parametrize(
    "state", ["[]", "3", "null", "{}", '{"save_state": 3}', '{"save_state": {"total_steps": "x"}}', "["]
)
def test_without_digests_a_state_of_another_form_is_found(without_manifest: Path, state: str) -> None:
    (without_manifest / STATE_FILE).write_text(state)
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: it does not hold the state of a run"):
        verify_checkpoint(without_manifest)


def test_an_empty_folder_and_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "step_99").mkdir()
    with pytest.raises(CheckpointError, match="step_99 is empty"):
        verify_checkpoint(tmp_path / "step_99")
    with pytest.raises(CheckpointError, match="step_100 is missing"):
        verify_checkpoint(tmp_path / "step_100")
    (tmp_path / "step_101").write_text("a file")
    with pytest.raises(CheckpointError, match="step_101 is missing"):
        verify_checkpoint(tmp_path / "step_101")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_whatever_dataloader_pt_holds_is_no_traceback(without_manifest: Path) -> None:
    """Every way of tearing a real file, and random bytes; what passes for one may come through, nothing else may."""
    path = without_manifest / LOADER_FILE
    original, drawn = path.read_bytes(), random.Random(0)
    garbage = [original[:length] for length in range(0, len(original), 7)]
    garbage += [
        bytes([*original[:offset], original[offset] ^ 0xFF, *original[offset + 1 :]])
        for offset in range(0, len(original), 5)
    ]
    garbage += [drawn.randbytes(length) for length in range(0, 400, 3)]
    garbage += [bytes([first, 2]) + drawn.randbytes(40) for first in range(256)]
    messages: list[str] = []
    for content in garbage:
        path.write_bytes(content)
        try:
            read_loader_state(without_manifest)
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > len(garbage) * 0.7
    assert all(text.startswith(f"{path} is damaged: ") and "\n" not in text for text in messages)


def test_another_object_in_dataloader_pt_is_found(without_manifest: Path) -> None:
    torch.save([1, 2], without_manifest / LOADER_FILE)
    with pytest.raises(CheckpointError, match="does not hold the state of a data loader"):
        verify_checkpoint(without_manifest)
