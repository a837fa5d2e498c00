"""Runs in an engine's worker: reads the weights of a version from the folder that the policy writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_grpo.weight_sync.engine_layers import ModelReload
from megatron_grpo.weight_sync.weights_folder import Manifest, WrittenTensor, compute_digest, read_manifest


class FileReceiver:
    """Reads the folder; ValueError: it is not the one that the policy writes to."""

    def __init__(self, worker: Any, source: Mapping[str, Any]) -> None:
        self._reload = ModelReload(worker)
        self._folder, self._session = Path(source["folder"]), source["session"]
        self._loaded: dict[str, str] = {}  # digest of each tensor that the model certainly holds
        self._read_manifest()

    def receive(self, version: int) -> None:
        """Verify all tensors of a version that must be loaded, then load them.

        Raises:
            ValueError: the folder has another version, or a file is missing or damaged. The model is unchanged.
        """
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
