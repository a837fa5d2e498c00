"""Checkpoints of models that are a few bytes, written as a run writes its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.config.schema import CheckpointingConfig
from megatron_grpo.controller.checkpoints import Checkpointer

MODELS = ("megatron", "megatron_value")


def save(
    run_dir: Path, *steps: int, score: float = 0.5, models: Sequence[str] = MODELS[:1], **settings: Any
) -> Checkpointer:
    """A checkpointer with checkpoints of these steps, each ranked by this score."""
    checkpointer = Checkpointer(run_dir, CheckpointingConfig(**settings))
    for step in steps:
        state = {"save_state": {"total_steps": step}, "metrics": {"val_accuracy": score}, "batch_cache": []}
        with checkpointer.writing(step, state, {"position": step}) as folder:
            for model in models:
                (folder / model).mkdir()
                for name in (".metadata", "common.pt", "metadata.json", "__0_0.distcp"):
                    (folder / model / name).write_bytes(f"{name} of step {step}".encode() * 20)
    return checkpointer
