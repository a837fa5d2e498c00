"""Checkpoints of runs as models: the folder that one is exported to, and the model that its run began with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import yaml

POLICY_FOLDER = "megatron"  # of the policy, in a checkpoint
EXPORTS_FOLDER = "exports"  # of exported checkpoints, in a run's folder


@dataclass(frozen=True, slots=True)
class CheckpointModel:
    """A checkpoint that is given as a model.

    Example: CheckpointModel(Path("run/checkpoints/step_50"), Path("run/exports/step_50"), "Qwen/Qwen3-8B")
    """

    checkpoint: Path
    export: Path  # folder in Hugging Face format; a run that begins from the checkpoint makes it
    origin: str  # folder or hub name of the model that the checkpoint's run began with
    is_reward_model: bool = False  # it scores conversations, and predicts no tokens


def find_checkpoint_model(path: str) -> CheckpointModel | None:
    """Find the model of a checkpoint; None: `path` is no checkpoint of a policy.

    ValueError: the configuration of its run, two folders above, does not say which model it began with.
    """
    checkpoint = Path(path)
    if not os.path.isdir(checkpoint / POLICY_FOLDER):  # unlike `Path.is_dir`, false for any impossible name
        return None
    checkpoint = checkpoint.resolve()
    run_dir = checkpoint.parent.parent
    try:
        values = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        origin, is_reward_model = values["policy"]["model"]["path"], values.get("algorithm") == "reward_model"
    except OSError as error:
        text = f"is a checkpoint without its run: {run_dir / 'config.yaml'}: {error.strerror}"
        raise ValueError(f"{text}; leave checkpoints in their run's folder, or export them") from None
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError):
        raise ValueError(f"is a checkpoint, and {run_dir / 'config.yaml'} is not the configuration of a run") from None
    return CheckpointModel(checkpoint, run_dir / EXPORTS_FOLDER / checkpoint.name, str(origin), is_reward_model)
