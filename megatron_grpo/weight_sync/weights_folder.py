"""The folder of weights with refit.mode=files, and its reader in an engine's worker.

FOLDER/manifest.json        written last, by rename: readers see one version or the next, never a part of it
FOLDER/000001/rank-0-0000.safetensors
FOLDER/000002/rank-0-0000.safetensors      only the tensors that changed
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_grpo.weight_sync.engine_adapters import make_loader

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
    """Random text of the process that wrote it: another run also has a version 3."""
    version: int
    tensors: Mapping[str, WrittenTensor]
    """All tensors by their Hugging Face names, in the order of the layers."""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the folder's version; ValueError: missing or damaged."""
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
    return xxhash.xxh3_128_hexdigest(text.encode())


def compute_digest(tensor: Tensor) -> str:
    """Compute XXH3 (128 bits) of a CPU tensor: finds damage, not malice."""
    hasher = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class FileReceiver:
    """Loads versions into a worker's model; ValueError: another run's folder."""

    def __init__(self, worker: Any, source: Mapping[str, Any]) -> None:
        self._reload = make_loader(worker, source)
        self._folder, self._session = Path(source["folder"]), source["session"]
        self._loaded: dict[str, str] = {}  # digest of each tensor that the model certainly holds
        self._read_manifest()

    def receive(self, version: int) -> None:
        """Verify a version's changed tensors, then load them; ValueError leaves the model unchanged."""
        manifest = self._read_manifest()
        if manifest.version != version:
            raise ValueError(f"{self._folder} holds version {manifest.version}, not {version}")
        changed = [name for name, tensor in manifest.tensors.items() if self._loaded.get(name) != tensor.digest]
        # vLLM converts a layer only when all of its tensors have come.
        blocks = {name_block(name) for name in changed}
        to_load = {name: tensor for name, tensor in manifest.tensors.items() if name_block(name) in blocks}
        for name, values in self._read_tensors(to_load):
            if compute_digest(values.contiguous()) != to_load[name].digest:
                raise ValueError(f"{self._folder / to_load[name].file}: {name} is not what was written")
        if not to_load:
            return
        loaded, self._loaded = self._loaded, {}  # empty while loading: a failure leaves unknown contents
        self._reload.begin()
        self._reload.load(self._read_tensors(to_load))
        self._reload.finish()
        self._loaded = loaded | {name: tensor.digest for name, tensor in to_load.items()}

    def abandon(self) -> None:
        self._reload.abandon()

    def _read_manifest(self) -> Manifest:
        manifest = read_manifest(self._folder)
        if manifest.session != self._session:
            raise ValueError(f"another run writes to {self._folder}; give each its own refit.directory")
        return manifest

    def _read_tensors(self, tensors: dict[str, WrittenTensor]) -> Iterator[tuple[str, Tensor]]:
        for name, written in tensors.items():
            try:
                with safe_open(self._folder / written.file, framework="pt") as file:
                    values = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{self._folder / written.file}: {name} cannot be read: {error}") from None
            yield name, values


def name_block(tensor: str) -> str:
    """Name the block of a tensor, like "model.layers.3.self_attn"; vLLM joins matrices only inside one."""
    parts = tensor.split(".")
    layer = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return tensor if layer is None else ".".join(parts[: layer + 2])
