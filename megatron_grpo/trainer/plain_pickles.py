"""Restricts the pickles of a distributed checkpoint to listed classes, so that reading a file runs none of its code.

By themselves, torch reads `.metadata` and the objects among the tensors, and Transformer Engine the state of its
layers, without such a list.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from megatron_grpo.config.errors import RunError

Allowed = dict[str, frozenset[str]]
"""Names that a pickle may import, by module."""

_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
_PATHS = frozenset({"PosixPath", "PurePosixPath"})
_OF_METADATA: Allowed = {
    "collections": frozenset({"OrderedDict"}),
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "torch": _DTYPES | {"Size"},
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.planner": frozenset(
        {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}
    ),
    "torch.serialization": frozenset({"_get_layout"}),
}
_OF_LAYER_STATE: Allowed = {
    "collections": frozenset({"OrderedDict"}),
    "megatron.core.extensions.transformer_engine": frozenset({"TEDelayedScaling"}),
    "torch._utils": frozenset({"_rebuild_tensor_v2"}),
    "torch.storage": frozenset({"_load_from_bytes"}),
    "transformer_engine.common.recipe": frozenset(
        {
            "DelayedScaling",
            "Float8BlockScaling",
            "Float8CurrentScaling",
            "Format",
            "MMParams",
            "MXFP8BlockScaling",
            "NVFP4BlockScaling",
            "QParams",
            "_FormatHelper",
        }
    ),
}
_ADVICE = "which no checkpoint of a run does: loading it could run its author's code; take the file from the run"


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, where: str, allowed: Allowed) -> None:
        super().__init__(file)
        self._where, self._allowed = where, allowed

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._allowed.get(module, ()):
            raise RunError(f"{self._where} names {module}.{name}, {_ADVICE}")
        if (module, name) == ("torch.storage", "_load_from_bytes"):  # it would unpickle without a list
            return lambda content: torch.load(io.BytesIO(content), weights_only=True)
        return super().find_class(module, name)


def _load_metadata(file: Any) -> Any:
    return _Unpickler(file, str(file.name), _OF_METADATA).load()


_load_bytes = DefaultLoadPlanner.load_bytes


def _load_plain_bytes(planner: DefaultLoadPlanner, item: ReadItem, content: io.BytesIO) -> None:
    """Load an entry with `weights_only`, and give torch's planner a copy, because the planner itself loads without."""
    copy = io.BytesIO()
    torch.save(_load_plain(content, f"its entry {item.dest_index.fqn}"), copy)
    copy.seek(0)
    _load_bytes(planner, item, copy)


def _load_plain(file: Path | io.BytesIO, where: str) -> Any:
    """Load a file of torch.save that holds tensors, numbers and texts alone; RunError when it names something else."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise describe_refusal(where, error) from None


def describe_refusal(where: str, error: pickle.UnpicklingError) -> RunError:
    """Message for a file that torch refused, without torch's advice to load it all the same.

    Args:
        where: the file, or the entry of a checkpoint.
        error: torch's error, whose text of many lines includes the name that is not allowed.
    """
    _, found, rest = str(error).partition("GLOBAL ")
    if not found:
        return RunError(f"{where} is damaged, or was not written by torch.save")
    return RunError(f"{where} names {rest.split()[0]}, {_ADVICE}")


def open_checkpoint(folder: str | Path) -> dict[str, Any]:
    """Restrict torch in this process to listed classes in checkpoints, and load the part that all ranks share.

    Raises:
        RunError: that part names something that is not on the list, or does not hold a dictionary.
    """
    filesystem.pickle = SimpleNamespace(load=_load_metadata, dump=pickle.dump)  # type: ignore[assignment]
    DefaultLoadPlanner.load_bytes = _load_plain_bytes  # type: ignore[assignment,method-assign]
    file = Path(folder, "common.pt")
    common = _load_plain(file, str(file))
    if not isinstance(common, dict):
        raise RunError(f"{file} does not hold the common part of a checkpoint")
    return common


def check_layer_state(name: str, state: torch.Tensor) -> torch.Tensor:
    """Check the pickled FP8 state of a Transformer Engine layer against the list of classes, and pickle it again.

    Args:
        name: the layer's name, for the message.
        state: the pickle, [bytes], uint8; empty: the layer has no such state.

    Returns:
        A pickle of the same content, which can be loaded without a list.

    Raises:
        RunError: the pickle names something that is not on the list.
    """
    if not state.numel():
        return state
    content = _Unpickler(io.BytesIO(state.cpu().numpy().tobytes()), f"its entry {name}", _OF_LAYER_STATE).load()
    return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
