"""Exports a checkpoint that a run begins from as its model."""

from __future__ import annotations

import subprocess
import sys

from megatron_grpo.config.errors import RunError
from megatron_grpo.models.checkpoint_model import find_checkpoint_model


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
    export = subprocess.run([sys.executable, "-m", "megatron_grpo.export", *arguments], capture_output=True, text=True)
    if export.returncode:
        lines = [line for line in (export.stderr or export.stdout).splitlines() if line.strip()] or ["no reason"]
        raise RunError(f"{key}={path} is a checkpoint that cannot be exported: {lines[-1]}")
