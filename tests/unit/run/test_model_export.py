"""A checkpoint that a run begins from is exported once, within a deadline."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.models.checkpoint_model import POLICY_FOLDER
from megatron_grpo.models.source import fetch_model_folder, find_local_folder
from megatron_grpo.run import exports


def test_an_export_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    (checkpoint / POLICY_FOLDER).mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("policy: {model: {path: some/model}}")
    monkeypatch.setattr(exports, "EXPORT_S", 0.001)
    with pytest.raises(RunError, match=r"^policy\.model\.path=.*: the export of .*step_3 did not end within 0\.001 s"):
        exports.export_checkpoint_model(str(checkpoint), "policy.model.path")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a run whose model is a folder."""
    folder = tmp_path / "run" / "checkpoints" / "step_3"
    (folder / POLICY_FOLDER).mkdir(parents=True)
    (folder / "manifest.json").write_text("first")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_bytes(b"base")
    (tmp_path / "run" / "config.yaml").write_text(f"policy: {{model: {{path: {tmp_path}/base}}}}")
    return folder


def count_exports(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Exports of a start from the checkpoint; what they would write is left out."""
    folders: list[str] = []

    def export(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = command[-1].removeprefix("output=")
        folders.append(Path(folder).name)
        Path(folder).mkdir()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", export)
    exports.export_checkpoint_model(str(checkpoint), "policy.model.path")
    return folders


def retrain(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("second")


def retrain_without_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    (checkpoint / POLICY_FOLDER / "common.pt").write_bytes(b"other weights")


def change_base(checkpoint: Path) -> None:
    (checkpoint.parents[2] / "base" / "model.safetensors").write_bytes(b"another base")


@pytest.mark.parametrize("change", [retrain, retrain_without_manifest, change_base])
def test_a_stale_export_is_never_taken_for_the_checkpoint(
    change: Callable[[Path], None], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = count_exports(checkpoint, monkeypatch)
    assert not count_exports(checkpoint, monkeypatch), "the same checkpoint is exported once"
    assert fetch_model_folder(str(checkpoint)).name == first
    change(checkpoint)
    assert find_local_folder(str(checkpoint)) == checkpoint.parents[2] / "base", "the old export is not its model"
    (second,) = count_exports(checkpoint, monkeypatch)
    assert second != first
    assert fetch_model_folder(str(checkpoint)).name == second


def test_folders_that_are_no_finished_export_of_it_are_not_taken(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = checkpoint.parents[1] / "exports"
    (exports / "step_3").mkdir(parents=True)
    (exports / f".{fetch_model_folder(str(checkpoint)).name}.incomplete-7").mkdir()
    assert len(count_exports(checkpoint, monkeypatch)) == 1
