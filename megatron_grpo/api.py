"""Runs for notebooks and scripts: `megatron_grpo.train`, with datasets, reward functions and callbacks as objects."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.algorithms.start import start
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.controller.user_objects import Callback, Given
from megatron_grpo.preflight.load import Checked, check_config, check_overrides
from megatron_grpo.script import (
    Overrides,
    check_objects,
    data_overrides,
    environment_overrides,
    reward_overrides,
    written,
)

DATA_FOLDER = "data"
"""Folder of the run in which the datasets of a script are kept."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What is left of a run."""

    run_dir: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A mapping for each step, as metrics.jsonl has it."""
        return _lines(self.run_dir / "metrics.jsonl")

    @property
    def validation(self) -> list[dict[str, Any]]:
        """A mapping for each validation."""
        return _lines(self.run_dir / "validation.jsonl")


def train(
    config: Config | Overrides,
    *,
    train_dataset: Any = None,
    val_dataset: Any = None,
    rewards: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    environments: Mapping[str, str | type] | None = None,
    tokenizer: Any = None,
    callbacks: Callback | Sequence[Callback] | None = None,
) -> FinishedRun:
    """Train as the command line does, from start (or resume) to end.

    Args:
        config: what would stand on the command line (["+exp=quickstart", "grpo.max_num_steps=3"]), or the same as a
            mapping ({"+exp": "quickstart", "grpo.max_num_steps": 3}) or, of one override, as a text; or a Config.
        train_dataset: training rows: a list of dicts, a `datasets.Dataset`, or a path or hub name; kept in the folder
            of the run, so that it can be resumed. None: as the configuration says.
        val_dataset: validation rows of the same kinds, or a mapping of several such sets by name.
        rewards: reward functions, import paths of such, and folders of reward models, or one of these, in place of the
            environment that data.task_name names.
        environments: by task name, classes of environments (`megatron_grpo.environments.interface.Environment`) that
            can be imported, or their types.
        tokenizer: tokenizer of the prompts; None: that of the model.
        callbacks: one or several, told of steps, validations, checkpoints and the end.

    Returns:
        The folder of the run and what was logged there.

    Raises:
        ConfigError: something is wrong with the configuration or with what is given.
        RunError: the run failed.
    """
    functions: dict[str, Callable[..., Any]] = {}
    rewards = [rewards] if isinstance(rewards, str) or callable(rewards) else () if rewards is None else rewards
    callbacks = [callbacks] if isinstance(callbacks, Callback) else () if callbacks is None else callbacks
    environments = {} if environments is None else environments
    check_objects(rewards, environments, tokenizer, callbacks)
    if isinstance(config, Config):
        if train_dataset is not None or val_dataset is not None or rewards or environments:
            text = "has its data and environments already; give overrides instead to have others"
            raise ConfigError([Problem("config", text)])
        checked = check_config(config)
    else:
        checked = _checked(config, (train_dataset, val_dataset), rewards, environments, functions)
    settled = checked.require()
    for remark in checked.remarks:
        print(f"{remark.subject} {remark.text}", flush=True)
    start(settled, Given(rewards=functions, tokenizer=tokenizer, callbacks=callbacks))
    return FinishedRun(Path(settled.run_dir))


def _checked(
    config: Overrides,
    datasets: tuple[Any, Any],
    rewards: Sequence[str | Callable[..., Any]],
    environments: Mapping[str, str | type],
    functions: dict[str, Callable[..., Any]],
) -> Checked:
    """Overrides with what was given beside them, checked; rows are written into the run's folder, where it is right.

    Args:
        config: the overrides.
        datasets: of training and of validation, as `train` takes them.
        rewards: as `train` takes them.
        environments: as `train` takes them.
        functions: gets the reward functions among `rewards`, by their names in the configuration.

    Raises:
        ConfigError: something is wrong; nothing is left in the run's folder then that was not there.
    """
    overrides = written(config)
    task, run_dir = _found(overrides)
    overrides.append(f"run_dir={run_dir}")
    overrides += reward_overrides(task, rewards, functions)
    overrides += environment_overrides(environments)
    folder = Path(run_dir) / DATA_FOLDER
    made = not folder.exists()
    try:
        overrides += data_overrides(folder, *datasets, bool(rewards))
        checked = check_overrides(overrides)
        checked.require()
    except ConfigError:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return checked


def _found(overrides: Sequence[str]) -> tuple[str, str]:
    """Task name and folder of the run that overrides make; of what is wrong with them nothing is said yet."""
    config = compose_typed(overrides).config
    return (Config().data.task_name, "") if config is None else (config.data.task_name, config.run_dir)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
