"""Runs on all three sides of a refit through files: the folder of a run's weights, and its manifest.

FOLDER/manifest.json        written last, by rename: readers see one version or the next, never a part of it
FOLDER/000001/rank-0-0000.safetensors
FOLDER/000002/rank-0-0000.safetensors      only the tensors that changed
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The file with the newest values of one tensor."""

    file: str
    """Path inside the folder."""
    digest: str
    """`digest` of the tensor."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of the weights."""

    session: str
    """Identifies the start of the run that wrote it: version 3 of another run is not this version 3."""
    version: int
    tensors: Mapping[str, StoredTensor]
    """By name in Hugging Face format, in the order of the layers."""

    @property
    def files(self) -> set[str]:
        """Files that hold tensors of this version."""
        return {one.file for one in self.tensors.values()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in self.tensors.values())

    def write(self, folder: Path) -> None:
        """Make this the version that the folder holds."""
        content = json.dumps(asdict(self))
        text = json.dumps({"digest": _text_digest(content), "content": content})
        written_whole(folder / MANIFEST, lambda path: path.write_text(text))

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The version that the folder holds.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        path = folder / MANIFEST
        try:
            whole = json.loads(path.read_text())
            content = whole["content"]
            intact = whole["digest"] == _text_digest(content)
            read: dict[str, Any] = json.loads(content) if intact else {}
        except OSError as error:
            raise ValueError(
                f"{path} cannot be read: {error.strerror}; refit.directory has to be a folder that policy and "
                "engines share, under the same path"
            ) from None
        except (ValueError, TypeError, KeyError):
            intact = False
        if not intact:
            raise ValueError(f"{path} is damaged")
        tensors = {name: StoredTensor(**one) for name, one in read["tensors"].items()}
        return Manifest(read["session"], read["version"], tensors)


def digest(tensor: Tensor) -> str:
    """XXH3 (128 bits) of dtype, shape and values, as hexadecimal digits: finds damage, not malice.

    Args:
        tensor: [...], contiguous, on the CPU.
    """
    hasher = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def written_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file under a temporary name, which is renamed when all of it is on the disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        _to_disk(partial)
        partial.replace(path)
        _to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def remove_unread(folder: Path, manifest: Manifest) -> None:
    """Delete the files that hold no tensor of this version; no process may be reading an earlier one."""
    kept = manifest.files
    for part in folder.iterdir():
        if not part.is_dir():
            continue
        for file in part.iterdir():
            if str(file.relative_to(folder)) not in kept:
                file.unlink()
        if not any(part.iterdir()):
            part.rmdir()


def _text_digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
