"""Safetensors files are checked by their headers; what the check passes, safetensors itself opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.preflight.model_file_checks import find_weight_problems
from tests.support.config_problems import SMALL, write_weights

SHAPE = parse_model_shape(SMALL)
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_weights(tmp_path / "model.safetensors", SMALL)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # safe_open is not a dict


def test_a_whole_model_is_right_in_one_file_and_in_several(folder: Path) -> None:
    assert list(find_weight_problems(folder, SHAPE)) == []
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(find_weight_problems(folder, SHAPE)) == []
    (folder / "b.safetensors").unlink()
    (text,) = find_weight_problems(folder, SHAPE)
    assert text == f"{folder}/b.safetensors does not exist, but model.safetensors.index.json names it"


def test_a_file_that_is_cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 1)
    (text,) = find_weight_problems(folder, SHAPE)
    assert text.startswith(f"{file} is not a complete safetensors file")
    assert "not fully covered" in text
    for left in (0, 5, 100):
        with file.open("r+b") as opened:
            opened.truncate(left)
        (text,) = find_weight_problems(folder, SHAPE)
        assert text.startswith(f"{file} is not a complete safetensors file")


def test_missing_tensors_and_other_shapes(folder: Path) -> None:
    tensors = tensors_of(folder)
    save_file({name: one for name, one in tensors.items() if name != NORM}, folder / "model.safetensors")
    assert list(find_weight_problems(folder, SHAPE)) == [f"the folder has no tensor {NORM}"]
    save_file({NORM: tensors[NORM]}, folder / "model.safetensors")
    (text,) = find_weight_problems(folder, SHAPE)
    assert text.endswith(f"and {len(tensors) - 2} others that config.json implies")
    save_file(tensors | {NORM: torch.zeros(3)}, folder / "model.safetensors")
    assert list(find_weight_problems(folder, SHAPE)) == [f"{NORM} has shape [3], but config.json implies [64]"]


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}', "[" * 100_000])
def test_a_broken_index(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    (text,) = find_weight_problems(folder, SHAPE)
    assert "is not a safetensors index" in text


@pytest.mark.parametrize("header", [b"[]", b'{"a": 3}', b'{"a": {"shape": [1]}}', b"{" * 50, b"\xff" * 20])
def test_a_broken_header(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (text,) = find_weight_problems(folder, SHAPE)
    assert "is not a complete safetensors file" in text
