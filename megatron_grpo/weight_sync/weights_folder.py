"""The folder through which policy and engines exchange weights with refit.mode=files.

FOLDER/manifest.json        written last, by rename: readers see one version or the next, never a part of it
FOLDER/000001/rank-0-0000.safetensors
FOLDER/000002/rank-0-0000.safetensors      only the tensors that changed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """The file with the newest values of one tensor."""

    file: str  # path inside the folder
    digest: str  # `compute_digest` of the tensor
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files that hold one version of the weights."""

    session: str
    """Identifies the start of the run that wrote it: version 3 of another run is not this version 3."""
    version: int
    tensors: Mapping[str, WrittenTensor]
    """All tensors by their Hugging Face names, in the order of the layers."""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the version that the folder holds; ValueError: it is missing or damaged."""
    path = folder / MANIFEST
    try:
        file = json.loads(path.read_text())
        is_intact = file["digest"] == compute_text_digest(file["content"])
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; refit.directory has to be a folder that policy and "
            "engines share, under the same path"
        ) from None
    except (ValueError, TypeError, KeyError):
        is_intact = False
    if not is_intact:
        raise ValueError(f"{path} is damaged")
    content = json.loads(file["content"])
    tensors = {name: WrittenTensor(**fields) for name, fields in content["tensors"].items()}
    return Manifest(content["session"], content["version"], tensors)


def compute_text_digest(text: str) -> str:
    """Compute XXH3 (128 bits) of a text, as hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def compute_digest(tensor: Tensor) -> str:
    """Compute XXH3 (128 bits) of dtype, shape and values: finds damage, not malice.

    The tensor is contiguous and on the CPU; the result has hexadecimal digits.
    """
    hasher = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
