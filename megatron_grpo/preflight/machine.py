"""Checks of what a configuration asks of this machine: GPUs, model, data files, the run directory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.data.rows import examine
from megatron_grpo.models.families import shape_of_folder
from megatron_grpo.models.source import is_hub_name, local_folder, made_before_the_run

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def machine_problems(config: Config) -> list[Problem]:
    """Everything that is missing here. Without the GPUs, only that: the files are looked for where the run will be."""
    missing_gpus = list(_gpus(config))
    if missing_gpus:
        return missing_gpus
    return [
        *_nodes(config),
        *_driver_gpu(config),
        *_packages(config),
        *_model(config),
        *_value_model(config),
        *_data(config),
        *_folders(config),
    ]


def visible_gpus() -> int:
    """CUDA devices of this machine as the driver's device files show them, within CUDA_VISIBLE_DEVICES."""
    devices = len([file for file in Path("/dev").glob("nvidia[0-9]*") if file.name.removeprefix("nvidia").isdigit()])
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return devices
    return min(devices, len([name for name in chosen.split(",") if name.strip() not in ("", "-1")]))


def _gpus(config: Config) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.gpus_per_node == 0 or cluster.ray_address is not None:
        return
    there = visible_gpus()
    if there < cluster.gpus_per_node:
        have = f"only {there} CUDA GPU(s)" if there else "no CUDA GPU"
        yield Problem(
            f"cluster.gpus_per_node={cluster.gpus_per_node}",
            f"this machine has {have}; start the run on such nodes, or give cluster.ray_address of a cluster of them",
        )


def _nodes(config: Config) -> Iterator[Problem]:
    if config.cluster.num_nodes > 1 and config.cluster.ray_address is None:
        text = "needs cluster.ray_address of a Ray cluster over the nodes; launchers/slurm_pyxis.sbatch starts one"
        yield Problem(f"cluster.num_nodes={config.cluster.num_nodes}", text)


def _driver_gpu(config: Config) -> Iterator[Problem]:
    if config.ppo.calculate_advantages_on_gpu and not visible_gpus():
        text = "the driver estimates advantages, and this machine, where it runs, has no CUDA GPU; use false"
        yield Problem("ppo.calculate_advantages_on_gpu=True", text)


def _packages(config: Config) -> Iterator[Problem]:
    if config.logger.wandb.enabled and importlib.util.find_spec("wandb") is None:
        yield Problem("logger.wandb.enabled=True", "needs the wandb package: pip install wandb, or set it to false")


def _model(config: Config) -> Iterator[Problem]:
    path = config.policy.model.path
    if made_before_the_run(config, path):
        return
    subject = f"policy.model.path={path}"
    unusable = list(_unusable(subject, path, reward_models=False))
    yield from unusable
    if unusable or is_hub_name(path):
        return  # of a hub model the rest is downloaded when the run starts
    yield from _no_weights(subject, Path(path))
    if not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
        yield Problem(subject, f"the folder holds no tokenizer ({', '.join(_TOKENIZER_FILES)})")


def _value_model(config: Config) -> Iterator[Problem]:
    path = config.value.model.path
    if path is None or made_before_the_run(config, path):
        return
    subject = f"value.model.path={path}"
    unusable = list(_unusable(subject, path, reward_models=True))
    yield from unusable
    if not unusable and not is_hub_name(path):
        yield from _no_weights(subject, Path(path))


def _unusable(subject: str, path: str, *, reward_models: bool) -> Iterator[Problem]:
    """Why this is no model that can be trained: it is not there, or its config.json is of another kind."""
    if is_hub_name(path):
        reason = None if local_folder(path) else _fetch_config(path)
        if reason is not None:
            yield Problem(subject, f"no such folder here, nor in the Hugging Face cache, and the hub says: {reason}")
            return
    elif not Path(path).is_dir():
        text = "no such folder; give a folder in Hugging Face format, or a hub name such as Qwen/Qwen3-8B"
        yield Problem(subject, text)
        return
    folder = local_folder(path)
    assert folder is not None
    try:
        shape_of_folder(folder, reward_models=reward_models)
    except ValueError as error:
        yield Problem(subject, str(error))


def _no_weights(subject: str, folder: Path) -> Iterator[Problem]:
    if not any(folder.glob("*.safetensors")):
        text = "the folder holds no *.safetensors; convert the weights with transformers' save_pretrained"
        yield Problem(subject, text)


def _fetch_config(path: str) -> str | None:
    """Download a hub model's config.json into the cache; the reason when that fails."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        hf_hub_download(path, "config.json")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        return str(error).strip().splitlines()[0]
    return None


def _data(config: Config) -> Iterator[Problem]:
    data, tasks = config.data, {config.data.task_name}
    for key, path in (("data.train_path", data.train_path), ("data.val_path", data.val_path)):
        if path is None or made_before_the_run(config, path):
            continue
        subject = f"{key}={path}"
        if not Path(path).is_file():
            yield Problem(subject, "no such file; give a JSONL file, one object with prompt and answer a line")
            continue
        report = examine(Path(path), data, set(config.env))
        yield from report.problems
        tasks |= report.tasks
        wanted, whole = config.prompts_per_generation_batch, not report.problems
        if key == "data.train_path" and whole and report.rows < wanted:
            text = f"has {report.rows} rows, fewer than the {wanted} prompts that are sampled together"
            yield Problem(subject, text)
        if key == "data.val_path" and whole and report.rows == 0:
            yield Problem(subject, "has no rows")
    for name in sorted(config.env.keys() - tasks):
        text = f"no prompt is for it: data.task_name is {data.task_name}, and no row has task_name {name}; mistyped?"
        yield Problem(f"env.{name}", text)


def _folders(config: Config) -> Iterator[Problem]:
    if not config.run_dir.strip():
        yield Problem("run_dir=", "is empty; give a folder")
    yield from _writable("run_dir", Path(config.run_dir))
    if config.prepare.name is not None:
        yield from _writable("prepare.folder", Path(config.prepare.folder))
    resume, own = config.checkpointing.resume, Path(config.run_dir, "checkpoints").glob("step_*")
    if resume not in ("auto", "none") and not Path(resume).is_dir() and not any(own):
        yield Problem(f"checkpointing.resume={resume}", "no such folder; give auto, none or the path of a checkpoint")


def _writable(key: str, folder: Path) -> Iterator[Problem]:
    if folder.is_symlink() and not folder.exists():
        yield Problem(f"{key}={folder}", "is a link that leads nowhere; delete it, or choose another folder")
        return
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        yield Problem(f"{key}={folder}", f"{existing} is a file, not a folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(f"{key}={folder}", f"no permission to write in {existing}")
