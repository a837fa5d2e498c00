"""Exports a checkpoint that a run begins from as its model."""

from __future__ import annotations

import subprocess
import sys

from megatron_grpo.config.errors import RunError
from megatron_grpo.models.checkpoint_model import find_checkpoint_model

EXPORT_S = 6 * 3600.0  # deadline of an export; a model of 1T parameters is written at 100 MB/s in that time


def export_checkpoint_model(path: str, key: str) -> None:
    """Export the checkpoint at `path` unless that was done; other models need nothing.

    RunError: it cannot be exported, for example because a file is damaged.
    """
    model = find_checkpoint_model(path)
    if model is None or model.export.is_dir():
        return
    print(f"exporting {model.checkpoint} to {model.export}", file=sys.stderr, flush=True)
    model.export.parent.mkdir(exist_ok=True)
    # In a process of its own, whose memory is free again before ranks and engines start.
    arguments = [f"checkpoint={model.checkpoint}", f"output={model.export}"]
    command = [sys.executable, "-m", "megatron_grpo.export", *arguments]
    try:
        export = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_S)
    except subprocess.TimeoutExpired:
        text = (
            f"the export of {model.checkpoint} did not end within {EXPORT_S:g} s; run {' '.join(command[1:])} by hand"
        )
        raise RunError(f"{key}={path}: {text}") from None
    if export.returncode:
        lines = [line for line in (export.stderr or export.stdout).splitlines() if line.strip()] or ["no reason"]
        raise RunError(f"{key}={path} is a checkpoint that cannot be exported: {lines[-1]}")
