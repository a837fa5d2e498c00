"""The generation worker's half of a refit through files: verify what has changed, then let vLLM load it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_grpo.refit.broadcast.loading import TensorwiseLoading
from megatron_grpo.refit.files.store import Manifest, Stored, digest


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """Where the weights of a run are."""

    folder: str
    session: str
    """Which start of which run writes there."""


class FilesReceiver:
    """One worker's reading of the folder.

    Args:
        model: vLLM's model.
        vllm_config: vLLM's settings of the engine.
        device: where the model is.
        shared: where the weights are.
        number: the worker's among those of all engines.

    Raises:
        ValueError: the folder is not the one that the policy writes to.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, device: torch.device, shared: SharedFolder, number: int
    ) -> None:
        self._model: Any = model
        self._loading = TensorwiseLoading(model, vllm_config.model_config.dtype)
        self._folder, self._session = Path(shared.folder), shared.session
        self._held: dict[str, str] = {}
        """Digest of each tensor that the model is known to have."""
        self._wanted: dict[str, Stored] = {}
        self._read_manifest()

    def begin(self) -> None:
        """Nothing is touched before all of it is verified."""

    def receive(self, version: int) -> None:
        """Verify what has to be loaded of a version.

        Raises:
            ValueError: the folder has another version, or a file is missing or damaged. The model is as it was.
        """
        manifest = self._read_manifest()
        if manifest.version != version:
            raise ValueError(f"{self._folder} holds version {manifest.version}, not {version}")
        changed = [name for name, one in manifest.tensors.items() if self._held.get(name) != one.digest]
        self._wanted = _complete(changed, manifest.tensors)
        for name, tensor in self._tensors():
            if digest(tensor.contiguous()) != self._wanted[name].digest:
                raise ValueError(f"{self._folder / self._wanted[name].file}: {name} is not what was written")

    def finish(self) -> None:
        """Load what was verified."""
        if not self._wanted:
            return
        held, self._held = self._held, {}  # until all of it is loaded, nothing is certain
        self._loading.begin()
        self._model.load_weights(self._tensors())
        self._loading.finish()
        self._held = held | {name: one.digest for name, one in self._wanted.items()}

    def abandon(self) -> None:
        """What is half loaded is forgotten."""
        self._loading.abandon()

    def _read_manifest(self) -> Manifest:
        manifest = Manifest.read(self._folder)
        if manifest.session != self._session:
            raise ValueError(f"another run writes to {self._folder}; give each its own refit.directory")
        return manifest

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor [...] on the CPU) of what has to be loaded, in the order of the layers."""
        with ExitStack() as open_files:
            path, file = None, None
            for name, one in self._wanted.items():
                try:
                    if one.file != path:
                        open_files.close()
                        file = open_files.enter_context(safe_open(self._folder / one.file, framework="pt"))
                        path = one.file
                    assert file is not None
                    tensor = file.get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise ValueError(f"{self._folder / one.file}: {name} cannot be read: {error}") from None
                yield name, tensor


def _complete(changed: Iterable[str], tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """What has to be loaded when some tensors have changed: vLLM makes a layer only of all that belongs to it."""
    blocks = {_block(name) for name in changed}
    return {name: one for name, one in tensors.items() if _block(name) in blocks}


def _block(name: str) -> str:
    """The part of the model that a tensor is loaded with, like "model.layers.3.self_attn"; vLLM joins no matrices
    across these."""
    parts = name.split(".")
    layer = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return name if layer is None else ".".join(parts[: layer + 2])
