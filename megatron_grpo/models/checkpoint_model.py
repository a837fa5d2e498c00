"""Checkpoints of runs as models: the folder that one is exported to, and the model that its run began with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64

from megatron_grpo.config.algorithms import choose_imported, find_algorithm
from megatron_grpo.config.outside_files import read_bytes, read_yaml
from megatron_grpo.models.heads import LOGITS, POLICY_HEADS, Head

POLICY_FOLDER = "megatron"  # of the policy, in a checkpoint
EXPORTS_FOLDER = "exports"  # of exported checkpoints, in a run's folder
_MOST_RUNS = 100  # each of which began with a checkpoint of the one before


@dataclass(frozen=True, slots=True)
class CheckpointModel:
    """A checkpoint that is given as a model.

    Example: CheckpointModel(
        Path("run/checkpoints/step_50"), Path("run/exports/step_50-3f0c5d2e9b1a7764"), "Qwen/Qwen3-8B"
    )
    """

    checkpoint: Path
    export: Path
    """Folder in Hugging Face format; a run that begins from the checkpoint makes it. Its name tells the content: a
    checkpoint that was trained again has another export."""
    origin: str  # folder or hub name of the model that the checkpoint's run began with
    head: Head = LOGITS


def find_checkpoint_model(path: str, later: tuple[Path, ...] = ()) -> CheckpointModel | None:
    """Find the model of a checkpoint; None: `path` is no checkpoint of a policy.

    `later`: checkpoints of runs that began with it, or with one of theirs. ValueError: the configuration of its run,
    two folders above, does not say which model it began with; its text has no subject.
    """
    checkpoint = Path(path)
    if not os.path.isdir(checkpoint / POLICY_FOLDER):  # unlike `Path.is_dir`, false for any impossible name
        return None
    checkpoint = checkpoint.resolve()
    run_dir = checkpoint.parent.parent
    config_file = run_dir / "config.yaml"
    try:
        values = read_yaml(config_file)
        origin = values["policy"]["model"]["path"]
        head = POLICY_HEADS[find_algorithm(choose_imported(values.get("algorithm"))).head]
    except OSError as error:
        raise ValueError(
            f"is a checkpoint without its run: {config_file}: {error.strerror}; "
            "leave checkpoints in their run's folder, or export them"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"is a checkpoint, and {config_file} is not the configuration of a run") from None
    if checkpoint in later:
        text = "is a checkpoint of a run that began with this checkpoint, or with that of a run that did"
        raise ValueError(f"{text}; put the model that it began with into {config_file}, policy.model.path")
    if len(later) > _MOST_RUNS:
        text = f"is a checkpoint of more than {_MOST_RUNS} runs, each of which began with one of another"
        raise ValueError(f"{text}; export one of theirs and begin with that")
    name = f"{checkpoint.name}-{_compute_content_digest(checkpoint, str(origin), (*later, checkpoint))}"
    return CheckpointModel(checkpoint, run_dir / EXPORTS_FOLDER / name, str(origin), head)


def _compute_content_digest(checkpoint: Path, origin: str, later: tuple[Path, ...]) -> str:
    """Digest a checkpoint's weights, and the model below its adapters."""
    digest = xxh3_64(origin.encode())
    manifest, base = checkpoint / "manifest.json", Path(origin)
    # The manifest has the digests of all files; without it, and for the base, sizes and times have to do.
    files = [] if manifest.is_file() else sorted((checkpoint / POLICY_FOLDER).rglob("*"))
    digest.update(read_bytes(manifest) if manifest.is_file() else b"")
    if os.path.isdir(base / POLICY_FOLDER):
        model = find_checkpoint_model(origin, later)
        digest.update(model.export.name.encode() if model is not None else b"")
    elif base.is_dir():
        files += sorted([*base.glob("*.safetensors"), *base.glob("*.json")])
    for file in files:
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} ".encode())
    return digest.hexdigest()
