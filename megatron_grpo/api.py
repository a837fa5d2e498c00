"""Runs for notebooks and scripts: `megatron_grpo.train`."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from megatron_grpo.algorithms.dispatch import run_algorithm
from megatron_grpo.config.compose import ComposedConfig, compose_typed
from megatron_grpo.config.data_schema import DataConfig
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.output import tolerant_output
from megatron_grpo.config.paths import SCRIPT_STREAM
from megatron_grpo.config.schema import Config
from megatron_grpo.data.image_rows import write_images
from megatron_grpo.data.table_values import StreamedRows
from megatron_grpo.models.image_processor import require_own_processor
from megatron_grpo.models.source import fetch_model_folder
from megatron_grpo.observability.run_files import read_steps
from megatron_grpo.preflight.load import check_config, check_overrides
from megatron_grpo.preflight.script_checks import find_argument_problems, find_processor_problems
from megatron_grpo.run.user_objects import Callback, ScriptData, UserObjects

Overrides = str | Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The folder of a finished run, and the metrics in it."""

    run_dir: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each step, from metrics.jsonl."""
        return read_steps(self.run_dir / "metrics.jsonl")

    @property
    def validation(self) -> list[dict[str, Any]]:
        """Metrics of each validation, from validation.jsonl."""
        return read_steps(self.run_dir / "validation.jsonl")


@tolerant_output(of_run=True)
def train(
    config: Config | Overrides | None = None,
    *,
    train_dataset: Any = None,
    val_dataset: Any = None,
    rewards: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    environments: Mapping[str, str | type] | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    callbacks: Callback | Sequence[Callback] | None = None,
    **unknown: Any,
) -> FinishedRun:
    """Train as the command line does, from start (or resume) to end.

    Args:
        config: overrides as on the command line, in a list, a mapping, or a single text; or a Config.
        train_dataset: training rows: an iterable of dicts, a `datasets.Dataset` or `IterableDataset`, or a path or hub
            name; rows are kept in the folder of the run, so that it can be resumed; with data.streaming=true an
            iterable may be endless, and is read from its beginning in each start. None: as the configuration says.
        val_dataset: validation rows of the same kinds, or a mapping of several such sets by name.
        rewards: reward functions, import paths or folders of reward models, for the environment of data.task_name.
        environments: classes that can be imported, or values of env.NAME.type, by task name.
        tokenizer: tokenizer of the prompts; None: that of `processor`, or the model's.
        processor: the model's own processor of images and text (transformers.AutoProcessor); None: that of its folder,
            which ranks and engines use too.
        callbacks: one or several callbacks.
        unknown: refused; the message names our counterpart of an argument of TRL's GRPOTrainer.

    Raises:
        ConfigError: the configuration or another argument has problems.
        RunError: the run failed.
    """
    start = time.time()
    problems = find_argument_problems(config, rewards, environments, tokenizer, callbacks, unknown=unknown)
    if problems := [*problems, *find_processor_problems(processor)]:
        raise ConfigError(problems)
    if tokenizer is None and processor is not None:
        tokenizer = processor.tokenizer
    callbacks = [callbacks] if isinstance(callbacks, Callback) else callbacks or ()
    functions: dict[str, Callable[..., Any]] = {}
    with ScriptData() as files:
        sets = (train_dataset, val_dataset)
        checked = _check_arguments(config, sets, rewards or (), environments or {}, functions, files)
        run_config = checked.require()
        if processor is not None:
            require_own_processor(processor, fetch_model_folder(run_config.policy.model.path))
        for remark in checked.remarks:
            print(f"{remark.subject} {remark.text}", flush=True)
        # Only now, so that a refused start leaves the run's folder unchanged.
        with files.move_in():
            rows = train_dataset if run_config.data.train_path == SCRIPT_STREAM else None
            objects = UserObjects(rewards=functions, tokenizer=tokenizer, callbacks=callbacks, train_rows=rows)
            run_algorithm(run_config, objects, start)
    return FinishedRun(Path(run_config.run_dir))


def _check_arguments(
    config: Config | Overrides | None,
    datasets: tuple[Any, Any],
    rewards: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
    environments: Mapping[str, str | type],
    functions: dict[str, Callable[..., Any]],
    files: ScriptData,
) -> ComposedConfig:
    """Check the configuration together with the objects of the script.

    Datasets are written to `files`; reward functions that cannot be imported are added to `functions`.
    """
    rewards = [rewards] if isinstance(rewards, str) or callable(rewards) else rewards
    if isinstance(config, Config):
        if any(dataset is not None for dataset in datasets) or rewards or environments:
            text = "has its data and environments already; to change them, give overrides instead of a Config"
            raise ConfigError([Problem("config", text)])
        return check_config(config)
    overrides = format_overrides(config)
    # ComposedConfig once without the objects, whose overrides need the names of the task and of the run's folder.
    composed = compose_typed(overrides)
    if composed.config is None:
        raise ConfigError(composed.rename_problems(composed.problems))
    task, run_dir = composed.config.data.task_name, composed.config.run_dir
    overrides.append(f"run_dir={run_dir}")  # fixed here, because its name may contain the time
    overrides += _make_reward_overrides(task, rewards, functions)
    overrides += make_environment_overrides(environments)
    data = composed.config.data
    overrides += _make_data_overrides(files, run_dir, *datasets, bool(rewards), data)
    checked = check_overrides(overrides, functions)
    checked.problems = [files.name_arguments(problem) for problem in checked.problems]
    checked.remarks = [files.name_arguments(remark) for remark in checked.remarks]
    files.settle_paths(checked.require())
    return checked


def _require_name(name: Any, argument: str, section: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*|0|[1-9][0-9]*", str(name)):
        text = (
            f"cannot be the NAME of {section}.NAME, because keys are split at dots; use letters (a-z, A-Z), digits, _ "
            "and -, and a letter or _ first (or digits alone)"
        )
        raise ConfigError([Problem(f"{argument}[{name!r}]", text)])


def _make_data_overrides(
    files: ScriptData, run_dir: str, training: Any, validation: Any, has_rewards: bool, data: DataConfig
) -> list[str]:
    """Write datasets that are objects; return the overrides of all datasets."""

    def store_dataset(dataset: Any, name: str, argument: str) -> tuple[str | Path, set[str]]:
        if isinstance(dataset, str | Path):
            return dataset, set()
        file, columns = _write_dataset(dataset, files.reserve_path(run_dir, name), argument, data.image_key)
        return files.select_file(file, argument), columns

    overrides = []
    columns: set[str] = set()
    if data.streaming and training is not None and not isinstance(training, str | Path):
        columns = _require_stream(training)
        overrides.append(f"data.train_path={SCRIPT_STREAM}")
    elif training is not None:
        path, columns = store_dataset(training, "train", "train_dataset")
        overrides.append(f"data.train_path={path}")
    if isinstance(validation, Mapping):
        for name, dataset in validation.items():
            _require_name(name, "val_dataset", "data.val_sets")
            path, _ = store_dataset(dataset, f"val_{name}", f"val_dataset[{name!r}]")
            overrides.append(f"data.val_sets.{name}.path={path}")
        overrides.append("data.val_path=null")
    elif validation is not None:
        overrides.append(f"data.val_path={store_dataset(validation, 'val', 'val_dataset')[0]}")
    elif training is not None:
        overrides.append("data.val_path=null")  # the recipe's validation rows belong to the recipe's task
    if has_rewards and columns and "answer" not in columns:
        overrides.append("data.answer_key=null")
    return overrides


def _require_stream(dataset: Any) -> set[str]:
    """Return the columns of the first row; ConfigError if rows cannot be read again."""
    text = f"is {type(dataset).__name__}; give an iterable of rows with data.streaming=true"
    if isinstance(dataset, Iterator):
        text = "can be read only once, and a resumed run reads it again; give an object with __iter__, not an iterator"
    elif isinstance(dataset, Iterable) and not isinstance(dataset, Mapping):
        row = next(iter(dataset), None)
        if isinstance(row, Mapping):
            return {str(column) for column in row}
        kind = "nothing" if row is None else type(row).__name__
        text = f"begins with {kind}; a row is a dict of its columns"
    raise ConfigError([Problem("train_dataset", text)])


def _write_dataset(dataset: Any, path: Path, subject: str, image_key: str | None) -> tuple[Path, set[str]]:
    """Write rows to `path`, with a suffix; return the file and the columns.

    `image_key`: column of images (data.image_key); None: rows have none.
    """
    if not isinstance(dataset, Iterable) or isinstance(dataset, Mapping):
        kinds = "rows (a list of dicts, a datasets.Dataset or IterableDataset), or a path or hub name"
        text = f"is {type(dataset).__name__}; give {kinds} (of a large hub set with data.streaming=true)"
        raise ConfigError([Problem(subject, text)])
    path.parent.mkdir(parents=True, exist_ok=True)
    # A Dataset of `datasets`; a stream of it has no number of rows.
    if hasattr(dataset, "column_names") and hasattr(dataset, "num_rows") and hasattr(dataset, "to_parquet"):
        file = path.with_suffix(".parquet")
        dataset.to_parquet(str(file))
        return file, set(dataset.column_names)
    file = path.with_suffix(".jsonl")
    columns: set[str] = set()
    rows = StreamedRows(dataset) if hasattr(dataset, "features") else dataset
    write = partial(json.dumps, ensure_ascii=False) if image_key is None else partial(write_images, column=image_key)
    with file.open("w", encoding="utf-8") as lines:
        for number, row in enumerate(rows):
            row_subject = f"{subject}[{number}]"
            if not isinstance(row, Mapping):
                raise ConfigError([Problem(row_subject, f"is {type(row).__name__}; a row is a dict of its columns")])
            try:
                lines.write(write(dict(row)) + "\n")
            except (TypeError, ValueError) as error:
                text = "give numbers, texts, lists and dicts, or a datasets.Dataset"
                raise ConfigError([Problem(row_subject, f"cannot be kept as JSON: {error}; {text}")]) from None
            columns |= {str(column) for column in row}
    return file, columns


def format_overrides(config: Any) -> list[str]:
    """Write overrides as on a command line; ConfigError if they are none."""
    if isinstance(config, str):
        return [config]
    if isinstance(config, Mapping):
        return [f"{key}={_format_value(value, str(key))}" for key, value in config.items()]
    if not isinstance(config, Sequence):
        text = f"is {type(config).__name__}; give a list of overrides, a mapping of keys and values, or a Config"
        raise ConfigError([Problem("config", text)])
    for number, override in enumerate(config):
        if not isinstance(override, str):
            text = f"is {type(override).__name__}; give the text of an override: 'grpo.max_num_steps=3'"
            raise ConfigError([Problem(f"config[{number}]", text)])
    return list(config)


def _format_value(value: Any, key: str) -> str:
    """Write a value in Hydra's syntax; `key` is for the error message."""
    if isinstance(value, np.generic):
        value = value.item()  # JSON has no numbers of NumPy
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, Mapping):
        members = (f"{name}:{_format_value(member, f'{key}.{name}')}" for name, member in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_format_value(member, key) for member in value) + "]"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    text = f"is {type(value).__name__}; give a number, a text, a path, true or false, or a list or mapping of such"
    raise ConfigError([Problem(key, text)])


def _make_reward_overrides(
    task: str, rewards: Sequence[str | Callable[..., Any]], functions: dict[str, Callable[..., Any]]
) -> list[str]:
    """Make the overrides of reward functions; add those without an import path to `functions`."""
    if not rewards:
        return []
    entries = []
    for reward in rewards:
        if isinstance(reward, str):
            entries.append(reward)
            continue
        module, path = getattr(reward, "__module__", None), getattr(reward, "__qualname__", "")
        is_importable = path.isidentifier() and getattr(inspect.getmodule(reward), path, None) is reward
        if is_importable and module not in (None, "__main__"):  # the main module has another name in other processes
            entries.append(f"{module}.{path}")
            continue
        # The name in metrics is that of the function, or of an object's class.
        name = getattr(reward, "__name__", type(reward).__name__)
        name = re.sub(r"\W", "_", name) if name != "<lambda>" else "reward"
        entry = f"given.{name}"  # stands for the path of a function that only the script has
        if entry in functions:
            text = f"has two functions called {name}; their rewards could not be told apart"
            raise ConfigError([Problem("rewards", text)])
        functions[entry] = reward
        entries.append(entry)
    quoted = ",".join(json.dumps(entry) for entry in entries)
    return [f"env.{task}.type=reward_functions", f"env.{task}.reward_funcs=[{quoted}]"]


def make_environment_overrides(environments: Mapping[str, str | type]) -> list[str]:
    """Make the overrides env.NAME.type; ConfigError if a name cannot be part of a key."""
    overrides = []
    for task, kind in environments.items():
        _require_name(task, "environments", "env")
        path = kind if isinstance(kind, str) else f"{kind.__module__}:{kind.__qualname__}"
        overrides.append(f"env.{task}.type={path}")
    return overrides
