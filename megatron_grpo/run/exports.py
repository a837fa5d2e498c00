"""Exports: of a checkpoint that a run begins from; the card and the upload of an exported folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_grpo.config.errors import RunError, select_first_line
from megatron_grpo.config.hiding import hide_secrets
from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.models.checkpoint_model import find_checkpoint_model
from megatron_grpo.models.source import list_hub_errors
from megatron_grpo.run.checkpoint_files import read_state
from megatron_grpo.run.directory import CONFIG_FILE, read_config_file

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


CARD = "README.md"


def write_model_card(output: Path, base: str, checkpoint: Path, *, adapters: bool) -> None:
    """Write the card of an exported model: its origin, its training and its metrics.

    `base`: path or hub name of the model that training started from; `checkpoint`: in its run's folder; `adapters`: the
    folder has adapters for the base model instead of a model.
    """
    from huggingface_hub import ModelCard, ModelCardData  # here: its import takes longer than all others together

    config, state = read_config_file(checkpoint.resolve().parent.parent / CONFIG_FILE), read_state(checkpoint)
    algorithm, data_config = str(config["algorithm"]), config["data"]
    paths = [dataset["path"] for dataset in data_config["train_sets"].values()] or [str(data_config["train_path"])]
    data = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["megatron_grpo", algorithm, "reinforcement-learning"],
    )
    metrics = {
        name: value
        for name, value in sorted(state["metrics"].items())
        if isinstance(value, int | float) and (name == "reward" or name.startswith("val_"))
    }
    text = f"""---
{data.to_yaml()}
---

# {output.name}

{"Adapters for" if adapters else "Trained from"} `{base}` with {algorithm.upper()} by megatron_grpo,
{state["save_state"]["total_steps"]} steps on `{", ".join(paths)}`.

| Metric | Value |
|---|---|
"""
    rows = "".join(f"| {name} | {value:.4g} |\n" for name, value in metrics.items())
    ModelCard(hide_secrets(text + rows)).save(output / CARD)
    (output / CARD).chmod(output.stat().st_mode & 0o666)  # as the other files of an export


def push_to_hub(folder: Path, name: str, base: str, checkpoint: Path, *, adapters: bool) -> str:
    """Send a folder with its card to the hub; returns its address.

    The repository `name`, ORGANISATION/NAME, is made (private) if it does not exist; other arguments as for the card.
    Raises RunError if the hub refuses the upload or cannot be reached.
    """
    from huggingface_hub import HfApi

    write_model_card(folder, base, checkpoint, adapters=adapters)
    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload the model")
    except list_hub_errors() as error:
        raise RunError(f"push_to_hub={name}: {select_first_line(error)}; {folder} has the model") from error
    return f"https://huggingface.co/{name}"
