"""One checkpoint on disk: the driver's files in it beside the models' folders, and whether all of it is as written."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

from megatron_grpo.run.directory import POLICY_FOLDER
from megatron_grpo.run.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    is_sealed,
    missing_is_an_error,
    read_sealed,
    verify_manifest,
    write_in_one_piece,
    write_manifest,
    write_sealed,
)

STATE_FILE = "state.json"
LOADER_FILE = "dataloader.pt"
_MODEL_FILES = (".metadata", "common.pt", "metadata.json")
"""What Megatron-Core writes beside the tensors, whatever the layout."""
_UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What torch.load raises for a file of other bytes, as its tests with random bytes show."""


def complete(folder: Path, step: int, state: Mapping[str, Any], loader_state: Mapping[str, Any]) -> None:
    """Add the driver's files to a folder that holds the models, and the manifest; then all of it is on disk.

    Args:
        folder: folder of the checkpoint, perhaps under a temporary name.
        step: training steps before the checkpoint.
        state: progress ("save_state"), metrics and what else the driver needs to continue (JSON).
        loader_state: state of the training data loader.
    """
    import torch  # not above: a command that only verifies a checkpoint answers at once

    torch.save(dict(loader_state), folder / LOADER_FILE)
    write_sealed(folder / STATE_FILE, state)
    write_manifest(folder, step, sealed=[STATE_FILE])


def replace_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace the driver's state of a checkpoint, in one piece.

    It carries its own digest, so the checkpoint is sound before and after; but for one without a manifest, where a
    digest would say that the manifest is missing.
    """
    if (folder / MANIFEST_FILE).exists():
        write_sealed(folder / STATE_FILE, state)
    else:
        write_in_one_piece(folder / STATE_FILE, json.dumps(dict(state)).encode())


def verify(folder: Path, stop: Event | None = None) -> str | None:
    """Read all of a checkpoint and compare it with what was written.

    Args:
        folder: folder of the checkpoint, `step_N`.
        stop: set by another thread to end this early, with CancelledError.

    Returns:
        A remark for the user about a checkpoint that is good; None: there is nothing to say.

    Raises:
        CheckpointError: a file is missing or damaged; the text names it.
        LaterFormatError: a later version wrote it.
        OSError: a file is there and cannot be read.
    """
    if not (folder / MANIFEST_FILE).exists():
        return _verify_without_manifest(folder)
    step = verify_manifest(folder, stop)
    written = read_state(folder)["save_state"]["total_steps"]
    if written != step:
        raise CheckpointError(f"{folder / STATE_FILE} is that of another checkpoint: of step {written}, not {step}")
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """The driver's state as it was written.

    Raises:
        CheckpointError: the file is missing or damaged.
        OSError: the file is there and cannot be read.
    """
    path = folder / STATE_FILE
    if (folder / MANIFEST_FILE).exists():
        return read_sealed(path)
    with missing_is_an_error(path):
        content = path.read_bytes()
    try:
        state = json.loads(content)
        if is_sealed(state):
            raise CheckpointError(f"{folder / MANIFEST_FILE} is missing")
        if not (isinstance(state["save_state"]["total_steps"], int) and isinstance(state["metrics"], dict)):
            raise TypeError("steps or metrics are of another type")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it does not hold the state of a run ({error})") from None
    return dict(state)


def read_loader_state(folder: Path) -> dict[str, Any]:
    """The state of the training data loader as it was written.

    Raises:
        CheckpointError: the file is missing or damaged.
        OSError: the file is there and cannot be read.
    """
    import torch

    path = folder / LOADER_FILE
    try:
        with missing_is_an_error(path):
            state = torch.load(path, weights_only=True)
    except _UNPICKLING_ERRORS as error:
        if isinstance(error, CheckpointError):
            raise
        text = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path} is damaged: it cannot be loaded ({type(error).__name__}: {text})") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it does not hold the state of a data loader")
    return state


def _verify_without_manifest(folder: Path) -> str:
    """What can be said of a checkpoint that a version before manifests wrote: that no file is missing or empty."""
    with missing_is_an_error(folder):
        if not any(folder.iterdir()):
            raise CheckpointError(f"{folder} is empty")
    read_state(folder)
    for name in (LOADER_FILE, *(f"{POLICY_FOLDER}/{name}" for name in _MODEL_FILES)):
        with missing_is_an_error(folder / name):
            if (folder / name).stat().st_size == 0:
                raise CheckpointError(f"{folder / name} is empty")
    read_loader_state(folder)
    return f"{folder} was written by an earlier version, without digests: damage to its weights would not be noticed"
