"""Objects that a script passes to a run: reward functions, a tokenizer, callbacks, and datasets.

Datasets are written aside, and moved into the run's folder when it may start.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from megatron_grpo.cluster.process_log import LOGS_FOLDER
from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.sources import SourceError, open_source
from megatron_grpo.observability.alarms import Alarm
from megatron_grpo.run.directory import CONFIG_FILE, LOCK_FILE, is_in_use, lock_run_directory

DATA_FOLDER = "data"  # subfolder of the run's folder for the datasets of a script


class Callback:
    """Base class of callbacks, which the driver calls between stages."""

    def on_start(self, step: int, run_dir: Path) -> None:
        """Called when all processes are up, after `step` steps."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | Literal["save"] | None:
        """Called after step `step` was logged; `metrics` are its figures, as in metrics.jsonl.

        If it returns True, training ends after this step, which is validated and saved like every last step. "save"
        writes a checkpoint, for which on_checkpoint is called; python -m megatron_grpo.export makes a model of it.
        """
        return None

    def on_alarm(self, alarm: Alarm) -> None:
        """Called before `on_step` of its step when an alarm begins (docs/operations.md)."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a validation; `metrics` are its figures, as in validation.jsonl."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called when a checkpoint is complete in `folder`."""

    def on_end(self, step: int) -> None:
        """Called when training has ended and its last checkpoint is written."""


class Callbacks:
    """Several callbacks as one."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        # Answers of on_step: to end training, and to write a checkpoint of the last step.
        self.wants_stop = self.wants_checkpoint = False

    def notify(self, event: str, *arguments: Any) -> None:
        """Call a method of every callback; raises RunError if that fails."""
        if event == "on_step":
            self.wants_checkpoint = False
        for callback in self._callbacks:
            try:
                answer = getattr(callback, event)(*arguments)
            except RunError:
                raise
            except Exception as error:  # a script's callback may raise anything
                name = f"{type(callback).__name__}.{event}"
                raise RunError(f"callback {name} raised {type(error).__name__}: {error}") from error
            if event == "on_step":
                self.wants_checkpoint = self.wants_checkpoint or answer == "save"
                self.wants_stop = self.wants_stop or (bool(answer) and answer != "save")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserObjects:
    """Objects that a script passes to a run."""

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Reward functions that cannot be imported, by their name in reward_funcs."""
    tokenizer: Any = None  # tokenizer of the prompts; None: the tokenizer of the model's folder
    callbacks: Sequence[Callback] = ()
    train_rows: Any = None  # iterable of rows, read again for each epoch and each start; None: data.train_path has them


class ScriptData(ExitStack):
    """Rows of a script, kept aside until the run may start.

    A start that is refused leaves the folder, and the rows of a live run in it, as they are.
    """

    def __init__(self) -> None:
        super().__init__()  # closes the folder aside
        self._run_dir = Path()
        # Folder beside or in run_dir, on the same file system; None: nothing was written.
        self._aside: Path | None = None
        # Files in it, their paths in the run's folder, and the script's argument of each for messages.
        self._moves: dict[Path, Path] = {}
        self._arguments: dict[Path, str] = {}

    def reserve_path(self, run_dir: str, name: str) -> Path:
        """Reserve the path, without a suffix, of a dataset.

        Raises ConfigError if run_dir is in use by a live run, or nothing can be written there.
        """
        if self._aside is None:
            if is_in_use(run_dir):
                raise ConfigError([Problem(f"run_dir={run_dir}", "is in use by another run that is still alive")])
            self._run_dir = Path(os.path.abspath(run_dir))
            # On the same file system as run_dir, so that the files can be moved into it.
            existing = next(folder for folder in (self._run_dir, *self._run_dir.parents) if folder.is_dir())
            try:
                aside = TemporaryDirectory(prefix=".megatron_grpo_", dir=existing, ignore_cleanup_errors=True)
            except OSError as error:
                raise ConfigError([Problem(f"run_dir={run_dir}", f"cannot be made: {error.strerror}")]) from None
            self._aside = Path(self.enter_context(aside))
        return self._aside / name

    def select_file(self, file: Path, argument: str) -> Path:
        """Select the file to read a dataset from.

        It is a file with the same rows in the run's folder, if there is one, and `file` is deleted; else `file`. Files
        that were not written where `reserve_path` said are the user's own, and stay. `argument`: that of the script,
        for messages. Raises ConfigError if run_dir has a run that began with other rows.
        """
        if file.parent != self._aside:
            return file
        folder = self._run_dir / DATA_FOLDER
        earlier = [folder / f"{file.stem}{suffix}" for suffix in (file.suffix, ".jsonl", ".parquet")]
        equal_file = next((path for path in earlier if path.is_file() and _has_equal_rows(path, file)), None)
        if equal_file is not None:
            file.unlink()
            return equal_file
        if argument == "train_dataset":
            self._refuse_other_rows(earlier)
        self._moves[file], self._arguments[file] = folder / file.name, argument
        return file

    def _refuse_other_rows(self, earlier: list[Path]) -> None:
        if (self._run_dir / CONFIG_FILE).exists() and any(path.exists() for path in earlier):
            text = "holds another run: train_dataset has other rows than when it began; choose another run_dir"
            raise ConfigError([Problem(f"run_dir={self._run_dir}", text)])

    def name_arguments(self, problem: Problem) -> Problem:
        """Name files in a problem as the script's arguments: train_dataset[3]."""
        subject, text = problem.subject, problem.text
        for file, argument in self._arguments.items():
            pattern = rf"(?:[\w.]+=)?{re.escape(str(file))}(?::(\d+)|, row (\d+))?"

            def name_row(match: re.Match[str], argument: str = argument) -> str:
                row = int(match[1]) - 1 if match[1] else match[2]  # lines count from 1
                return argument if row is None else f"{argument}[{row}]"

            subject, text = re.sub(pattern, name_row, subject), re.sub(pattern, name_row, text)
        return Problem(subject, text)

    def settle_paths(self, config: Config) -> None:
        """Replace files in a configuration by those in the run's folder."""
        final = {str(file): str(path) for file, path in self._moves.items()}
        data = config.data
        data.train_path = final.get(data.train_path, data.train_path)
        data.val_path = final.get(data.val_path, data.val_path) if data.val_path is not None else None
        for dataset in data.val_sets.values():
            dataset.path = final.get(dataset.path, dataset.path)

    @contextmanager
    def move_in(self) -> Iterator[None]:
        """Move the files into the run's folder.

        A start that is refused in the body removes them. Raises ConfigError if run_dir has a run that began with other
        rows, and RunError if the folder is in use by a live run, or cannot be written.
        """
        folder = self._run_dir
        new_folders: list[Path] = []
        if self._moves:
            new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
            with lock_run_directory(str(folder)):
                for file, path in self._moves.items():
                    if self._arguments[file] == "train_dataset":
                        self._refuse_other_rows([path])
                    path.parent.mkdir(exist_ok=True)
                    file.replace(path)
        self.close()
        try:
            yield
        except ConfigError:
            if folder in new_folders:
                with suppress(RunError, OSError), lock_run_directory(str(folder)):
                    if set(os.listdir(folder)) <= {LOCK_FILE, LOGS_FOLDER, DATA_FOLDER}:
                        shutil.rmtree(folder)
                        for path in new_folders[1:]:
                            path.rmdir()
            raise


def _has_equal_rows(earlier: Path, file: Path) -> bool:
    if earlier.suffix == file.suffix and filecmp.cmp(earlier, file, shallow=False):
        return True
    # Two versions of pyarrow write the same rows differently, so other bytes may have the same rows.
    try:
        sources = [open_source(DatasetConfig(path=str(path))) for path in (earlier, file)]
        same_length = len(sources[0]) == len(sources[1])
        return same_length and all(a == b for a, b in zip_longest(*(source.read_all() for source in sources)))
    except SourceError:
        return False
