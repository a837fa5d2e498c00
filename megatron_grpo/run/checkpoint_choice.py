"""Which checkpoint a run starts from, or a command reads: found, verified, and checked against the run."""

from __future__ import annotations

from pathlib import Path
from threading import Event

from megatron_grpo.config.conversion import convert_values
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import Config, LoraConfig
from megatron_grpo.data.identity import find_training_difference, identify, read_identity
from megatron_grpo.run.checkpoints import Checkpointer
from megatron_grpo.run.directory import CONFIG_FILE, DATA_FILE, VALUE_FOLDER, read_config_file


def find_start_checkpoint(checkpointer: Checkpointer, config: Config, stop: Event | None = None) -> Path | None:
    """Find the checkpoint to start from, and check it against the run.

    Raises:
        ConfigError: checkpointing.resume selects no usable checkpoint, one without the value model of PPO, or one of a
            run with other adapters.
        RunError: a file cannot be read.
    """
    path, subject = checkpointer.find_start(stop), f"checkpointing.resume={config.checkpointing.resume}"
    if path is not None and config.value_model is not None and not (path / VALUE_FOLDER).is_dir():
        raise ConfigError([Problem(subject, f"{path} is not a checkpoint of PPO: it has no value model")])
    before, now = None if path is None else _describe_adapters(path), config.policy.lora.description
    if before not in (None, now):
        text = f"{path} was written with {before}, and this run has {now}; choose another run_dir, or the same adapters"
        raise ConfigError([Problem(subject, text)])
    reason = None if path is None else _describe_data_difference(path, config)
    if reason is not None:
        text = f"{path} has a position in other data: {reason}; to train its weights on this data, export it"
        raise ConfigError([Problem(subject, f"{text} (python -m megatron_grpo.export) and give policy.model.path")])
    return path


def _describe_data_difference(checkpoint: Path, config: Config) -> str | None:
    """Say how the data differs from that of a checkpoint's run."""
    try:
        before = read_identity(checkpoint.parent.parent / DATA_FILE)
    except ValueError as error:
        return str(error)
    return None if before is None else find_training_difference(before, identify(config))


# Names that stand for a checkpoint of a run: the first by checkpointing.metric_name, and the last.
BEST, NEWEST = "best", "newest"


def resolve_checkpoint(path: Path) -> Path:
    """Find the checkpoint of a path, perhaps checkpoints/best or newest.

    Raises:
        ValueError: the run of such a path has no checkpoint, or its configuration cannot be read.
    """
    if path.name not in (BEST, NEWEST) or path.exists():
        return path
    run_dir = path.parent.parent
    try:
        values = read_config_file(run_dir / CONFIG_FILE)
    except FileNotFoundError:
        raise ValueError(f"checkpoint={path}: {run_dir} is not the folder of a run: it has no {CONFIG_FILE}") from None
    config, problems = convert_values(values, str(values.get("algorithm", "grpo")))
    if config is None:
        raise ConfigError(problems)
    checkpointer = Checkpointer(run_dir, config.ranked_checkpointing, look_only=True)
    steps = checkpointer.list_steps()
    if not steps:
        raise ValueError(f"checkpoint={path}: {path.parent} has no checkpoint")
    if path.name == NEWEST:
        return checkpointer.locate(steps[-1])
    ranked = checkpointer.rank(steps)
    if not ranked:
        raise ValueError(f"checkpoint={path}: no checkpoint of {path.parent} has a state that can be read; name one")
    return checkpointer.locate(ranked[0])


def _describe_adapters(checkpoint: Path) -> str | None:
    """Describe the adapters of a checkpoint's run, if known."""
    try:
        lora = read_config_file(checkpoint.parent.parent / CONFIG_FILE)["policy"]["lora"]
        return LoraConfig(**lora).description
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None  # ranks compare their own adapters with those in the checkpoint
