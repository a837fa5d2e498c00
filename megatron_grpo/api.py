"""Runs for notebooks and scripts: `megatron_grpo.train`, with datasets, reward functions and callbacks as objects."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from megatron_grpo.algorithms.dispatch import run_algorithm
from megatron_grpo.config.compose import Composed, compose_typed
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.output import tolerant_output
from megatron_grpo.config.schema import Config
from megatron_grpo.data.table_values import StreamedRows
from megatron_grpo.observability.run_files import read_lines
from megatron_grpo.preflight.load import check_config, check_overrides
from megatron_grpo.preflight.script_checks import find_argument_problems
from megatron_grpo.run.script_data import ScriptData
from megatron_grpo.run.user_objects import Callback, UserObjects

GIVEN = "given"
"""Name that replaces the module in the path of a reward function that cannot be imported."""

Overrides = str | Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The folder of a finished run, and the metrics in it."""

    run_dir: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each step, from metrics.jsonl."""
        return read_lines(self.run_dir / "metrics.jsonl")

    @property
    def validation(self) -> list[dict[str, Any]]:
        """Metrics of each validation, from validation.jsonl."""
        return read_lines(self.run_dir / "validation.jsonl")


@tolerant_output(of_run=True)
def train(
    config: Config | Overrides | None = None,
    *,
    train_dataset: Any = None,
    val_dataset: Any = None,
    rewards: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    environments: Mapping[str, str | type] | None = None,
    tokenizer: Any = None,
    callbacks: Callback | Sequence[Callback] | None = None,
    **unknown: Any,
) -> FinishedRun:
    """Train as the command line does, from start (or resume) to end.

    Args:
        config: overrides as on the command line (["+exp=quickstart", "grpo.max_num_steps=3"]), as a mapping
            ({"+exp": "quickstart", "grpo.max_num_steps": 3}), or a single one as a text; or a Config. Required.
        train_dataset: training rows: a list or another iterable of dicts, a `datasets.Dataset` or `IterableDataset`, or
            a path or hub name; rows are kept in the folder of the run, so that it can be resumed. None: as the
            configuration says.
        val_dataset: validation rows of the same kinds, or a mapping of several such sets by name.
        rewards: one or several reward functions, their import paths, or folders of reward models; they replace the
            environment that data.task_name names.
        environments: environments by task name: classes that can be imported
            (`megatron_grpo.environments.interface.Environment`), or values of env.NAME.type.
        tokenizer: tokenizer of the prompts; None: the model's tokenizer.
        callbacks: one or several callbacks, called at steps, validations, checkpoints and the end of the run.
        unknown: refused; the message names the counterpart of an argument of TRL's GRPOTrainer.

    Returns:
        The folder of the run, with its metrics.

    Raises:
        ConfigError: the configuration or another argument has problems.
        RunError: the run failed.
    """
    began, functions = time.time(), dict[str, Callable[..., Any]]()
    arguments = {
        "config": config,
        "rewards": rewards,
        "environments": environments,
        "tokenizer": tokenizer,
        "callbacks": callbacks,
    }
    problems = find_argument_problems(arguments, unknown)
    if problems:
        raise ConfigError(problems)
    assert config is not None
    rewards = [rewards] if isinstance(rewards, str) or callable(rewards) else () if rewards is None else rewards
    callbacks = [callbacks] if isinstance(callbacks, Callback) else () if callbacks is None else callbacks
    environments = {} if environments is None else environments
    objects = train_dataset is not None or val_dataset is not None or rewards or environments
    if isinstance(config, Config) and objects:
        text = "has its data and environments already; give overrides instead to have others"
        raise ConfigError([Problem("config", text)])
    with ScriptData() as files:
        if isinstance(config, Config):
            checked = check_config(config)
        else:
            checked = _checked(config, (train_dataset, val_dataset), rewards, environments, functions, files)
        settled = checked.require()
        for remark in checked.remarks:
            print(f"{remark.subject} {remark.text}", flush=True)
        with files.move_in():
            run_algorithm(settled, UserObjects(rewards=functions, tokenizer=tokenizer, callbacks=callbacks), began)
    return FinishedRun(Path(settled.run_dir))


def _checked(
    config: Overrides,
    datasets: tuple[Any, Any],
    rewards: Sequence[str | Callable[..., Any]],
    environments: Mapping[str, str | type],
    functions: dict[str, Callable[..., Any]],
    files: ScriptData,
) -> Composed:
    """Check overrides together with the objects of the script; datasets are written to `files`.

    Reward functions that cannot be imported are added to `functions`.
    """
    overrides = format_overrides(config)
    composed = compose_typed(overrides)
    if composed.config is None:
        raise ConfigError(composed.rename_problems(composed.problems))
    task, run_dir = composed.config.data.task_name, composed.config.run_dir
    overrides.append(f"run_dir={run_dir}")  # fixed here, because its name may contain the time
    overrides += _reward_overrides(task, rewards, functions)
    overrides += make_environment_overrides(environments)
    overrides += _data_overrides(files, run_dir, *datasets, bool(rewards))
    checked = check_overrides(overrides)
    checked.problems = [files.name_arguments(problem) for problem in checked.problems]
    checked.remarks = [files.name_arguments(remark) for remark in checked.remarks]
    files.settle_paths(checked.require())
    return checked


def _check_name(name: Any, argument: str, section: str) -> None:
    """Refuse a name in an argument of `train` that cannot be part of a key of this section ("data.val_sets")."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*|0|[1-9][0-9]*", str(name)):
        text = (
            f"cannot be a name in {section}.NAME, whose keys have dots between their parts; use letters (a-z, A-Z), "
            "digits, _ and -, and a letter or _ first (or digits alone)"
        )
        raise ConfigError([Problem(f"{argument}[{name!r}]", text)])


def _data_overrides(files: ScriptData, run_dir: str, training: Any, validation: Any, rewarded: bool) -> list[str]:
    """Write datasets that are objects to `files`; returns the overrides with the paths of all datasets."""

    def keep(dataset: Any, name: str, argument: str) -> tuple[str, set[str]]:
        if isinstance(dataset, str | Path):
            return str(dataset), set()
        path, columns = _kept(dataset, files.reserve_path(run_dir, name), argument)
        return str(files.select_file(Path(path), argument)), columns

    written = []
    columns: set[str] = set()
    if training is not None:
        path, columns = keep(training, "train", "train_dataset")
        written.append(f"data.train_path={path}")
    if isinstance(validation, Mapping):
        for name, one in validation.items():
            _check_name(name, "val_dataset", "data.val_sets")
            path, _ = keep(one, f"val_{name}", f"val_dataset[{name!r}]")
            written.append(f"data.val_sets.{name}.path={path}")
        written.append("data.val_path=null")
    elif validation is not None:
        written.append(f"data.val_path={keep(validation, 'val', 'val_dataset')[0]}")
    elif training is not None:
        written.append("data.val_path=null")  # the recipe's validation rows belong to the recipe's task
    if rewarded and columns and "answer" not in columns:
        written.append("data.answer_key=null")
    return written


def _kept(dataset: Any, path: Path, subject: str) -> tuple[str, set[str]]:
    """Write a dataset that is an object to `path`; returns its path and its columns (of a file, none are known)."""
    if isinstance(dataset, str | Path):
        return str(dataset), set()
    if not isinstance(dataset, Iterable) or isinstance(dataset, Mapping):
        kinds = "rows (a list of dicts, a datasets.Dataset or IterableDataset), or a path or hub name"
        text = f"is {type(dataset).__name__}; give {kinds} (of a large hub set with data.streaming=true)"
        raise ConfigError([Problem(subject, text)])
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and hasattr(dataset, "num_rows") and hasattr(dataset, "to_parquet"):
        file = path.with_suffix(".parquet")
        dataset.to_parquet(str(file))
        return str(file), set(columns)
    return _kept_lines(dataset, path.with_suffix(".jsonl"), subject)


def _kept_lines(rows: Iterable[Any], file: Path, subject: str) -> tuple[str, set[str]]:
    """Write rows one by one, as JSON; returns the path of the file and the columns of the rows."""
    columns: set[str] = set()
    if hasattr(rows, "features"):  # a stream of `datasets`
        rows = StreamedRows(rows)
    with file.open("w", encoding="utf-8") as lines:
        for number, row in enumerate(rows):
            place = f"{subject}[{number}]"
            if not isinstance(row, Mapping):
                raise ConfigError([Problem(place, f"is {type(row).__name__}; a row is a dict of its columns")])
            try:
                lines.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
            except (TypeError, ValueError) as error:
                text = "give numbers, texts, lists and dicts, or a datasets.Dataset"
                raise ConfigError([Problem(place, f"cannot be kept as JSON: {error}; {text}")]) from None
            columns |= {str(column) for column in row}
    return str(file), columns


def format_overrides(config: Any) -> list[str]:
    """The overrides that a script gave, in the form of a command line.

    Raises:
        ConfigError: they are not overrides, or a value cannot stand on a command line.
    """
    if isinstance(config, str):
        return [config]
    if isinstance(config, Mapping):
        return [f"{key}={_value(value, str(key))}" for key, value in config.items()]
    if not isinstance(config, Sequence):
        text = f"is {type(config).__name__}; give a list of overrides, a mapping of keys and values, or a Config"
        raise ConfigError([Problem("config", text)])
    for number, one in enumerate(config):
        if not isinstance(one, str):
            text = f"is {type(one).__name__}; give the text of an override: 'grpo.max_num_steps=3'"
            raise ConfigError([Problem(f"config[{number}]", text)])
    return list(config)


def _value(value: Any, key: str) -> str:
    """A value in Hydra's syntax; `key` is its key, for the error message."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_value(one, f'{key}.{name}')}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_value(one, key) for one in value) + "]"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    text = f"is {type(value).__name__}; give a number, a text, a path, true or false, or a list or mapping of such"
    raise ConfigError([Problem(key, text)])


def _reward_overrides(
    task: str, rewards: Sequence[str | Callable[..., Any]], functions: dict[str, Callable[..., Any]]
) -> list[str]:
    """Overrides for an environment of reward functions; functions without an import path are added to `functions`."""
    if not rewards:
        return []
    entries = []
    for reward in rewards:
        if isinstance(reward, str):
            entries.append(reward)
            continue
        entry = _import_path(reward)
        if entry is None:
            # The name in metrics is that of the function, or of an object's class.
            name = getattr(reward, "__name__", type(reward).__name__)
            name = re.sub(r"\W", "_", name) if name != "<lambda>" else "reward"
            entry = f"{GIVEN}.{name}"
            if entry in functions:
                text = f"has two functions called {name}; their rewards could not be told apart"
                raise ConfigError([Problem("rewards", text)])
            functions[entry] = reward
        entries.append(entry)
    quoted = ",".join(json.dumps(entry) for entry in entries)
    return [f"env.{task}.type=reward_functions", f"env.{task}.reward_funcs=[{quoted}]"]


def _import_path(function: Callable[..., Any]) -> str | None:
    """The import path of a function; None if it is defined in a script, in a notebook or in another function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    found = getattr(inspect.getmodule(function), name, None)
    return f"{module}.{name}" if found is function else None


def make_environment_overrides(environments: Mapping[str, str | type]) -> list[str]:
    """The overrides env.NAME.type of environments by task name.

    Raises:
        ConfigError: a name cannot be part of a key.
    """
    found = []
    for task, kind in environments.items():
        _check_name(task, "environments", "env")
        path = kind if isinstance(kind, str) else f"{kind.__module__}:{kind.__qualname__}"
        found.append(f"env.{task}.type={path}")
    return found
