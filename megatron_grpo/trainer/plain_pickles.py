"""Restricts a distributed checkpoint's pickles to listed classes, so that reading a file runs none of its code.

Without this, torch reads `.metadata` and objects among the tensors, and Transformer Engine its state, with no list.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.outside_files import require_regular_files

AllowedNames = dict[str, str]  # names that a pickle may import, with blanks between them, by module

_DTYPES = " ".join(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
# pathlib._local is Python 3.13's.
_METADATA_NAMES = {
    "collections": "OrderedDict",
    "pathlib": "PosixPath PurePosixPath",
    "pathlib._local": "PosixPath PurePosixPath",
    "torch": f"Size {_DTYPES}",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.serialization": "_get_layout",
}
_LAYER_STATE_NAMES = {
    "collections": "OrderedDict",
    "megatron.core.extensions.transformer_engine": "TEDelayedScaling",
    "megatron.core.safe_globals": "safe_load_from_bytes",
    "torch._utils": "_rebuild_tensor_v2",
    "torch.storage": "_load_from_bytes",
    "transformer_engine.common.recipe": "DelayedScaling Float8BlockScaling Float8CurrentScaling Format MMParams "
    "MXFP8BlockScaling NVFP4BlockScaling QParams _FormatHelper",
}
_ADVICE = "which no checkpoint of a run does: loading it could run its author's code; take the file from the run"


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, where: str, allowed: AllowedNames) -> None:
        super().__init__(file)
        self._where, self._allowed = where, allowed

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._allowed.get(module, "").split():
            raise RunError(f"{self._where} names {module}.{name}, {_ADVICE}")
        # `torch.storage._load_from_bytes` would unpickle without a list, had Megatron-Core's import not replaced it.
        return super().find_class(module, name)


_load_bytes = DefaultLoadPlanner.load_bytes


def _load_plain_bytes(planner: DefaultLoadPlanner, item: ReadItem, content: io.BytesIO) -> None:
    # torch's planner loads without `weights_only`, so it gets a copy of an entry that was loaded with it.
    copy = io.BytesIO()
    torch.save(_load_plain(content, f"its entry {item.dest_index.fqn}"), copy)
    copy.seek(0)
    _load_bytes(planner, item, copy)


def _load_plain(file: Path | io.BytesIO, where: str) -> Any:
    """Load a file of only tensors, numbers and texts, else RunError."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise describe_refusal(where, error) from None


def describe_refusal(where: str, error: pickle.UnpicklingError) -> RunError:
    """Describe a file or entry that torch refused, without torch's advice."""
    # torch's text of many lines includes the name that is not allowed.
    _, separator, refused = str(error).partition("GLOBAL ")
    if not separator:
        return RunError(f"{where} is damaged, or was not written by torch.save")
    return RunError(f"{where} names {refused.split()[0]}, {_ADVICE}")


def open_checkpoint(folder: str | Path) -> dict[str, Any]:
    """Open a checkpoint, whose pickles may name listed classes only.

    From now on this process refuses other classes in metadata and entries of all distributed checkpoints, by a
    RunError. Returns the part of the checkpoint that the ranks share.
    """

    def load_metadata(file: Any) -> Any:
        return _Unpickler(file, str(file.name), _METADATA_NAMES).load()

    filesystem.pickle = SimpleNamespace(load=load_metadata, dump=pickle.dump)  # type: ignore[assignment]
    DefaultLoadPlanner.load_bytes = _load_plain_bytes  # type: ignore[assignment,method-assign]
    try:
        require_regular_files(Path(folder))
    except ValueError as error:
        raise RunError(str(error)) from None
    file = Path(folder, "common.pt")  # Megatron-Core before 0.19 wrote it; now the common part is one of the entries
    common = _load_plain(file, str(file)) if file.exists() else load_common_state_dict(folder)
    if not isinstance(common, dict):
        raise RunError(f"{folder} does not hold the common part of a checkpoint")
    return common


def check_layer_state(name: str, state: torch.Tensor) -> torch.Tensor:
    """Check and copy the pickle of a layer's FP8 state, [bytes], uint8, else RunError."""
    if not state.numel():  # the layer has no such state
        return state
    content = _Unpickler(io.BytesIO(state.cpu().numpy().tobytes()), f"its entry {name}", _LAYER_STATE_NAMES).load()
    return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
