"""Checks of a model's safetensors files by their headers: no file cut off, no tensor missing or of another shape."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.models.families import weight_entries
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import global_entries, wanted_experts

_INDEX_FILE, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100 * 2**20
"""Bytes; safetensors itself refuses more."""


def weight_problems(folder: Path, shape: ModelShape) -> Iterator[str]:
    """What is wrong with the weights in a folder; of many mistakes of one kind the first.

    Args:
        folder: model folder in Hugging Face format.
        shape: sizes of the model that is to be made of the weights.
    """
    try:
        shapes = _tensor_shapes(folder)
    except ValueError as error:
        yield str(error)
        return
    entries = global_entries(weight_entries(shape), shape, list(range(shape.layers)))
    wanted = {
        tensor.name.format(layer=layer, expert=expert): tensor.shape(shape)
        for entry, layer, _ in entries
        if not entry.zero_if_absent
        for expert in wanted_experts(entry, shape)
        for tensor in entry.hf
    }
    missing = [name for name in wanted if name not in shapes]
    if missing:
        more = f", and {len(missing) - 1} others that config.json implies" if len(missing) > 1 else ""
        yield f"the folder has no tensor {missing[0]}{more}"
    for name, expected in wanted.items():
        if name in shapes and shapes[name] != expected:
            yield f"{name} has shape {list(shapes[name])}, but config.json implies {list(expected)}"
            return


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the folder.

    Raises:
        ValueError: a file is missing, cut off or no safetensors file; names it.
    """
    index = folder / _INDEX_FILE
    if not index.is_file():
        return _shapes_in(folder / _SINGLE_FILE, f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}")
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(file_of.values()))
    except OSError as error:
        raise ValueError(f"{index} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f'{index} is not a safetensors index (JSON with a "weight_map")') from None
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files:
        shapes |= _shapes_in(folder / str(name), f"{folder / str(name)} does not exist, but {_INDEX_FILE} names it")
    return shapes


def _shapes_in(file: Path, missing: str) -> dict[str, tuple[int, ...]]:
    try:
        size = os.path.getsize(file)
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            header = json.loads(opened.read(length) if length <= min(size, _LONGEST_HEADER) else b"")
        tensors = {name: one for name, one in header.items() if name != "__metadata__"}
        shapes = {name: tuple(map(int, one["shape"])) for name, one in tensors.items()}
        end = _LENGTH_BYTES + length + max((int(one["data_offsets"][1]) for one in tensors.values()), default=0)
    except FileNotFoundError:
        raise ValueError(missing) from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, KeyError, IndexError, TypeError, RecursionError):
        raise ValueError(f"{file} is not a complete safetensors file: its header cannot be read") from None
    if size < end:
        raise ValueError(f"{file} is cut off: it has {size} bytes, and its tensors need {end}")
    return shapes
