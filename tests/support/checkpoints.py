"""Checkpoints of models that are a few bytes, written as a run writes its own."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_grpo.config.schema import CheckpointingConfig
from megatron_grpo.run.checkpoints import Checkpointer

MODELS = ("megatron", "megatron_value")


def fake_models(step: int, *folders: str) -> Any:
    """Models by folder that write some bytes which tell the step."""

    def write(folder: str, background: bool) -> dict[str, Any]:
        for name in (".metadata", "common.pt", "metadata.json", "__0_0.distcp"):
            Path(folder, name).write_bytes(f"{name} of step {step}".encode() * 20)
        return {}

    return {folder: SimpleNamespace(save_checkpoint=write) for folder in folders}


def save(
    run_dir: Path, *steps: int, score: float = 0.5, models: Sequence[str] = MODELS[:1], **settings: Any
) -> Checkpointer:
    """A checkpointer with checkpoints of these steps, each ranked by this score."""
    checkpointer = Checkpointer(run_dir, CheckpointingConfig(**settings))
    for step in steps:
        state = {"save_state": {"total_steps": step}, "metrics": {"val_accuracy": score}, "batch_cache": []}
        checkpointer.begin(step, state, {"position": step}, fake_models(step, *models))
        checkpointer.finish()
    return checkpointer
