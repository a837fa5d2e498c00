"""The folder of a refit through files: what is written, what is read, and that damage shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_grpo.weight_sync.file_writer import FileWriter
from megatron_grpo.weight_sync.transfer_modes import remove_unread, write_manifest
from megatron_grpo.weight_sync.weights_folder import (
    MANIFEST,
    Manifest,
    WrittenTensor,
    compute_digest,
    name_block,
    read_manifest,
)

NAMES = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_a_digest_is_of_every_bit_and_of_what_it_means(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert compute_digest(tensor) == compute_digest(tensor.clone())
    changed = tensor.clone()
    changed.reshape(-1).view(torch.uint8)[-1] ^= 1
    assert compute_digest(changed) != compute_digest(tensor)
    assert compute_digest(tensor[None]) != compute_digest(tensor)


def test_equal_bytes_of_another_type_have_another_digest() -> None:
    tensor = torch.randn(4)
    assert compute_digest(tensor) != compute_digest(tensor.view(torch.int32))


def test_a_version_has_the_changed_tensors_only_and_older_files_go(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path, bucket_bytes=100)
    values = {name: torch.randn(10) for name in NAMES}  # 40 bytes: two of them in a file

    first = writer.write(values.items(), "1", 0, rewrite=False)
    assert len({one.file for one in first.values()}) == 3
    _is_readable(tmp_path, first, values)

    values[NAMES[1]] = torch.randn(10)
    values[NAMES[4]] = torch.randn(10)
    second = writer.write(values.items(), "2", 0, rewrite=False)
    assert [name for name in NAMES if second[name].file.startswith("2/")] == [NAMES[1], NAMES[4]]
    _is_readable(tmp_path, second, values)

    for name in NAMES[:2]:  # now nothing of the first file is wanted any more
        values[name] = torch.randn(10)
    third = writer.write(values.items(), "3", 0, rewrite=False)
    remove_unread(tmp_path, Manifest("run", 3, third))
    _is_readable(tmp_path, third, values)
    left = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert left == ["rank-0-0001.safetensors", "rank-0-0002.safetensors"]

    whole = writer.write(values.items(), "4", 0, rewrite=True)
    assert all(one.file.startswith("4/") for one in whole.values())
    remove_unread(tmp_path, Manifest("run", 4, whole))
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_after_a_failure_everything_is_written_again(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path, bucket_bytes=50)
    values = {name: torch.randn(10) for name in NAMES}
    writer.write(values.items(), "1", 0, rewrite=False)

    def failing() -> Iterator[tuple[str, Tensor | None]]:
        yield from list(values.items())[:2]
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        writer.write(failing(), "2", 0, rewrite=False)
    again = writer.write(values.items(), "3", 0, rewrite=False)
    assert all(one.file.startswith("3/") for one in again.values())


def test_ranks_that_have_no_tensors_write_nothing(tmp_path: Path) -> None:
    assert FileWriter(tmp_path, 100).write([(name, None) for name in NAMES], "1", 1, rewrite=False) == {}
    assert not any((tmp_path / "1").iterdir())


def test_a_manifest_is_read_as_it_was_written_and_damage_shows(tmp_path: Path) -> None:
    manifest = Manifest("run", 7, {"a": WrittenTensor("1/x", "00ff", 12)})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST], "no temporary file is left"
    text = (tmp_path / MANIFEST).read_text()
    for place in range(0, len(text), 7):
        damaged = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
        (tmp_path / MANIFEST).write_text(damaged)
        try:
            same = json.loads(damaged) == json.loads(text)  # a space between the parts
        except ValueError:
            same = False
        if not same:
            with pytest.raises(ValueError, match="is damaged"):
                read_manifest(tmp_path)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"cannot be read: No such file .* refit\.directory has to be a folder that"):
        read_manifest(tmp_path)


def test_what_is_loaded_is_whole_layers() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.2.mlp.experts.0.up_proj.weight",
        "model.norm.weight",
    ]

    def loaded(changed: str) -> list[int]:
        return [number for number, name in enumerate(names) if name_block(name) == name_block(changed)]

    assert loaded(names[0]) == [0]
    assert loaded(names[1]) == [1, 2]
    assert loaded(names[3]) == [3]
    assert loaded(names[5]) == [5, 6], "the router and the experts of a layer"
    assert loaded(names[8]) == [8]


def _is_readable(folder: Path, stored: dict[str, WrittenTensor], values: dict[str, Tensor]) -> None:
    assert list(stored) == list(values)
    for name, one in stored.items():
        read = load_file(folder / one.file)[name]
        assert torch.equal(read, values[name])
        assert compute_digest(read) == one.digest
        assert one.nbytes == read.nbytes
