"""A checkpoint as policy.model.path: the folder that stands for it before and after its export."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_grpo.models.source import fetch_model_folder, find_local_folder
from megatron_grpo.preflight.model_file_checks import explain_unusable_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a run that began with the model in `origin`."""
    (tmp_path / "origin").mkdir()
    folder = tmp_path / "run" / "checkpoints" / "step_5"
    (folder / "megatron").mkdir(parents=True)
    values = {"policy": {"model": {"path": str(tmp_path / "origin")}}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(values))
    return folder


def test_its_export_stands_for_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    export = fetch_model_folder(str(checkpoint))
    assert export.parent == tmp_path / "run" / "exports"
    assert export.name.startswith("step_5-")
    assert find_local_folder(str(checkpoint)) == tmp_path / "origin", "whose sizes and tokenizer it has"
    export.mkdir(parents=True)
    assert find_local_folder(str(checkpoint)) == export


def test_of_a_checkpoint_of_a_checkpoint_the_first_model_has_the_sizes(checkpoint: Path, tmp_path: Path) -> None:
    second = tmp_path / "second" / "checkpoints" / "step_9"
    (second / "megatron").mkdir(parents=True)
    values = {"policy": {"model": {"path": str(checkpoint)}}}
    (tmp_path / "second" / "config.yaml").write_text(yaml.safe_dump(values))
    assert find_local_folder(str(second)) == tmp_path / "origin"


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda run: (run / "config.yaml").unlink(), "is a checkpoint without its run"),
        (lambda run: (run / "config.yaml").write_text("a: 1"), "is not the configuration of a run"),
        (lambda run: (run.parent / "origin").rmdir(), "the model that its run began with is not there"),
    ],
)
def test_a_checkpoint_that_cannot_be_a_model_is_explained(checkpoint: Path, damage: object, text: str) -> None:
    assert callable(damage)
    damage(checkpoint.parent.parent)
    (problem,) = explain_unusable_model(f"policy.model.path={checkpoint}", str(checkpoint))
    assert text in problem.text
