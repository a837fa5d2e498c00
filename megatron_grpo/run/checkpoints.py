"""Checkpoints of a run: found, verified, written atomically, and deleted beyond keep_top_k."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from megatron_grpo.batch.finished_samples import FINISHED_FOLDER, remove_taken
from megatron_grpo.config.algorithms import choose_imported
from megatron_grpo.config.conversion import convert_values
from megatron_grpo.config.errors import ConfigError, ModelLostError, Problem, RunError
from megatron_grpo.config.loop_schema import VALIDATION_PREFIX
from megatron_grpo.config.schema import CheckpointingConfig, Config, LoraConfig
from megatron_grpo.data.identity import find_training_difference, identify, read_identity
from megatron_grpo.observability.file_digests import FileRecord, FileRecords
from megatron_grpo.observability.run_files import VALIDATION_FILE, read_metrics, read_steps, sync
from megatron_grpo.run import checkpoint_files as files
from megatron_grpo.run.directory import CONFIG_FILE, DATA_FILE, VALUE_FOLDER, read_config_file
from megatron_grpo.run.uploads import CheckpointUploads

if TYPE_CHECKING:
    from megatron_grpo.trainer.model_ranks import ModelRanks

CHECKPOINTS_FOLDER = "checkpoints"  # of all checkpoints, in a run's folder
_DAMAGED = "damaged_step_"
_LEAST_FREE = 2**20  # free bytes of a disk below which a failed write is explained by the disk being full


@dataclass(slots=True)
class PendingSave:
    """A checkpoint that is being written under a temporary name."""

    step: int
    folder: Path
    state: Mapping[str, Any]
    loader_state: Mapping[str, Any]
    writers: Mapping[str, ModelRanks]  # models whose ranks write in the background, by folder
    began: float  # time.monotonic() when the save began
    records: dict[str, FileRecord] = field(default_factory=dict)
    """Of the files that ranks have written, by their path in the checkpoint."""

    def add(self, name: str, records: FileRecords) -> None:
        """Add the records of a model's folder."""
        self.records |= {f"{name}/{file}": record for file, record in records.items()}


class Checkpointer:
    """The folder run_dir/checkpoints, which the driver alone writes.

    `look_only`: let `find_start` only say which damaged checkpoints it would set aside.
    """

    def __init__(self, run_dir: Path, config: CheckpointingConfig, *, look_only: bool = False) -> None:
        self.config, self._look_only, self.folder = config, look_only, run_dir / CHECKPOINTS_FOLDER
        self.keep_forever: Callable[[int], bool] = lambda step: False
        """keep_forever(step): True for checkpoints that pruning must not delete; `open_run` sets it."""
        self.on_complete: Callable[[int, Path], None] = lambda step, folder: None
        """Called with step and folder of every complete checkpoint; `setup` sets this and `note`."""
        self.note: Callable[[str], None] = lambda text: None  # takes messages for the user about saved checkpoints
        self.pending: PendingSave | None = None
        self.save_s: dict[int, float] = {}  # seconds of each save of this process, by step
        self.uploads = CheckpointUploads(config, run_dir)
        self._last_save = time.monotonic()  # the beginning of the last save, or of the run

    def is_due(self, step: int) -> bool:
        """True if checkpointing.save_period or save_minutes ask for a save."""
        minutes, passed_s = self.config.save_minutes, time.monotonic() - self._last_save
        return step % self.config.save_period == 0 or (minutes is not None and passed_s >= 60 * minutes)

    def find_start(
        self, stop: Event | None = None, read_contents: files.ReadContents | None = None, *, is_restart: bool = False
    ) -> Path | None:
        """Find the checkpoint to start from (checkpointing.resume), and verify its files.

        `stop` and `read_contents` are those of `verify_checkpoint`. `is_restart`: the run has begun, so its newest
        checkpoint comes first. Damaged checkpoints are renamed (set aside), and standard error says which and why.

        Raises:
            ConfigError: the named folder is not an intact checkpoint, no checkpoint of the run directory is intact, or
                it has later checkpoints than the one to start from, which this run would mix with its own.
            RunError: a file cannot be read, or a later version wrote the checkpoint.
        """
        resume, steps = self.config.resume, self.list_steps()
        path = None if resume in ("auto", "none") else Path(resume).resolve()
        is_foreign = path is not None and path.parent != self.folder.resolve()
        # A run that began with another run's checkpoint goes on from its own: a job queued again has the same command.
        if resume == "auto" or ((is_foreign or is_restart) and (steps or self._list_set_aside())):
            return self._find_newest_intact(stop, read_contents)
        start_step = 0
        if path is not None:
            self._require_intact(path, stop, read_contents)
            start_step = 0 if is_foreign else files.read_state(path)["save_state"]["total_steps"]
        if steps and steps[-1] > start_step:
            later = f"{self.folder} has later checkpoints, up to step {steps[-1]}"
            raise self._make_refusal(
                f"would go on after step {start_step}, and {later}; choose another run_dir, or delete them"
            )
        return path

    def _make_refusal(self, text: str) -> ConfigError:
        return ConfigError([Problem(f"checkpointing.resume={self.config.resume}", text)])

    def list_steps(self) -> list[int]:
        """List the steps of the run's checkpoints, ascending and not verified."""
        names = (path.name.removeprefix("step_") for path in self.folder.glob("step_*"))
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def locate(self, step: int) -> Path:
        """Name the folder of the checkpoint after `step` steps."""
        return self.folder / f"step_{step}"

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        loader_state: Mapping[str, Any],
        models: Mapping[str, ModelRanks],
        *,
        images: Collection[str] = (),
        background: bool = False,
    ) -> None:
        """Begin to write checkpoint `step`, which `finish` completes.

        `step`: training steps so far; `state`: what the driver needs to continue (JSON), not changed until `finish`;
        `loader_state`: that of the training data; `models`: by their folder in the checkpoint; `images`: digests of
        those that `state` names. With `background` ranks write in the background, and the call returns as soon as the
        models may change.
        """
        self.finish()
        # The folder is renamed when all files are on disk, last the manifest with their digests, so every checkpoint
        # with a final name is complete. The temporary one is named only once: writers of killed ranks may still work.
        folder, began = self.folder / f".writing_step_{step}_{os.getpid()}_{time.monotonic_ns()}", time.monotonic()
        self._last_save = began
        with self._writing(step, folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            files.copy_images(images, self.folder.parent, folder)
            pending = PendingSave(step, folder, state, loader_state, models if background else {}, began)
            for name, model in models.items():
                (folder / name).mkdir()
                pending.add(name, model.save_checkpoint(str(folder / name), background=background))
        self.pending = pending

    def advance(self) -> None:
        """Complete the pending checkpoint if its ranks have written; report uploads."""
        self.uploads.report()
        if self.pending is not None and all(model.is_checkpoint_written() for model in self.pending.writers.values()):
            self.finish()

    def finish(self) -> None:
        """Wait until the pending checkpoint is complete, then prune.

        Raises RunError if it could not be written and is abandoned; earlier checkpoints are unchanged.
        """
        pending = self.pending
        if pending is None:
            return
        with self._writing(pending.step, pending.folder):
            for name, model in pending.writers.items():
                pending.add(name, model.finish_checkpoint())
            files.write_driver_files(pending.folder, pending.step, pending.state, pending.loader_state, pending.records)
            self._remove(pending.step)
            pending.folder.rename(self.locate(pending.step))
            sync(self.folder)
            remove_taken(self.folder.parent / FINISHED_FOLDER, pending.state["save_state"].get("generation_batches", 0))
            self.uploads.add(self.locate(pending.step))
            self._prune()
            self.on_complete(pending.step, self.locate(pending.step))
        self.pending = None
        seconds = self.save_s[pending.step] = time.monotonic() - pending.began
        duration = f"in the background, {seconds:.1f} s after it began" if pending.writers else f"in {seconds:.1f} s"
        self.note(f"saved {self.locate(pending.step)} {duration}")

    @contextmanager
    def _writing(self, step: int, folder: Path) -> Iterator[None]:
        """Abandon the checkpoint if the body fails; a file error becomes a RunError."""
        try:
            yield
        except BaseException as error:
            self.pending = None
            is_full = self.folder.is_dir() and shutil.disk_usage(self.folder).free < _LEAST_FREE
            shutil.rmtree(folder, ignore_errors=True)  # which leaves room for the summary on a full disk
            is_explained = isinstance(error, ModelLostError) or (isinstance(error, RunError) and not is_full)
            # torch raises RuntimeError when the disk is full.
            if is_explained or not isinstance(error, OSError | RuntimeError):
                raise
            reason, steps = "the disk is full" if is_full else error, self.list_steps()
            advice = f"{self.locate(steps[-1])} is the last checkpoint" if steps else "there is no earlier checkpoint"
            raise RunError(f"{self.locate(step)} cannot be written: {reason}; {advice}") from error

    def replace_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Atomically replace the driver's state in a checkpoint, then prune."""
        files.replace_state(self.locate(step), state)
        self._prune()  # new metrics may change the ranking

    def remove_leftovers(self) -> None:
        """Delete folders that an interrupted write or removal left behind."""
        for pattern in (".writing_step_*", ".removing_step_*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def _find_newest_intact(self, stop: Event | None, read_contents: files.ReadContents | None) -> Path | None:
        """Find the newest intact checkpoint, and set later ones aside; None: there are none."""
        damaged: dict[int, files.CheckpointError] = {}
        for step in reversed(self.list_steps()):
            try:
                remark = files.verify_checkpoint(self.locate(step), stop, read_contents)
            except files.CheckpointError as error:
                damaged[step] = error
                continue
            except OSError as error:  # the content may be intact, and readable at another try
                text = "make it readable, or rename it to go on from the one before"
                raise RunError(f"{self.locate(step)} cannot be read: {error}; {text}") from None
            for bad_step, reason in damaged.items():
                _print_warning(f"{reason}; {self.locate(bad_step)} {self._set_aside(bad_step)}")
            if damaged:
                verb = "would go on" if self._look_only else "going on"
                _print_warning(f"{verb} from {self.locate(step)}, the newest checkpoint that is intact")
            if remark:
                _print_warning(remark)
            return self.locate(step)
        if not (damaged or self._list_set_aside()):
            return None
        # Nothing is renamed now: a second try must not find an empty folder and begin anew over the run's files.
        faults = [str(error) for error in damaged.values()]
        faults = faults or [f"{path} was set aside" for path in self._list_set_aside()]
        text = f"finds no intact checkpoint in {self.folder}, and will not begin anew over what this run has written"
        raise self._make_refusal(f"{text}: {'; '.join(faults)}. Put intact files back, or begin in another run_dir")

    def _require_intact(self, path: Path, stop: Event | None, read_contents: files.ReadContents | None) -> None:
        """Check the checkpoint that checkpointing.resume names."""
        try:
            if not (path / files.STATE_FILE).is_file() and not (path / files.MANIFEST_FILE).is_file():
                raise self._make_refusal(f"is not a checkpoint: it has no {files.STATE_FILE}")
            remark = files.verify_checkpoint(path, stop, read_contents)
        except files.CheckpointError as error:
            raise self._make_refusal(f"cannot be started from: {error}; name another checkpoint") from None
        except OSError as error:
            raise self._make_refusal(f"cannot be read: {error}") from None
        if remark:
            _print_warning(remark)

    def _list_set_aside(self) -> list[Path]:
        """List the damaged checkpoints that earlier starts have set aside."""
        return sorted(self.folder.glob(f"{_DAMAGED}*"))

    def _set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint; returns words for a message."""
        if self._look_only:
            return "would be set aside"
        target, number = self.folder / f"{_DAMAGED}{step}", 1
        while target.exists():
            number += 1
            target = self.folder / f"{_DAMAGED}{step}.{number}"
        try:
            self.locate(step).rename(target)
        except OSError as error:
            raise RunError(f"{self.locate(step)} is damaged and cannot be set aside: {error}") from None
        sync(self.folder)
        return f"is set aside as {target.name}"

    def _prune(self) -> None:
        if self.config.keep_top_k is None:
            return
        steps = self.list_steps()
        for step in {*self.rank(steps)[self.config.keep_top_k :]} - {*steps[-self.config.keep_newest :]}:
            if not self.keep_forever(step) and not self.uploads.holds(self.locate(step)):
                self._remove(step)

    def rank(self, steps: Sequence[int]) -> list[int]:
        """Sort the steps of readable checkpoints, the best first."""
        metric, sign = self.config.metric_name, 1 if self.config.higher_is_better else -1
        scores: dict[int, float] = {}
        for step in steps:
            try:
                value = step if metric is None else files.read_state(self.locate(step))["metrics"].get(metric)
            except (files.CheckpointError, OSError):
                continue
            is_number = isinstance(value, int | float) and math.isfinite(value)  # NaN cannot be sorted
            scores[step] = float(value) * (1 if metric is None else sign) if is_number else -math.inf
        return sorted(scores, key=lambda step: (scores[step], step), reverse=True)

    def _remove(self, step: int) -> None:
        if self.locate(step).exists():
            # Renamed first, so that a checkpoint that can be found is complete.
            temporary = self.folder / f".removing_step_{step}"
            shutil.rmtree(temporary, ignore_errors=True)
            self.locate(step).rename(temporary)
            shutil.rmtree(temporary)


def _print_warning(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # flushed, so that a start that fails later does not rename in silence


def find_start_checkpoint(
    checkpointer: Checkpointer,
    config: Config,
    stop: Event | None = None,
    read_contents: files.ReadContents | None = None,
) -> Path | None:
    """Find the checkpoint to start from, and check it against the run.

    `stop` and `read_contents` are those of `verify_checkpoint`. Raises ConfigError if checkpointing.resume selects
    no usable checkpoint, one without the value model of PPO, or one of a run with other adapters or data, and
    RunError if a file cannot be read.
    """
    path, subject = checkpointer.find_start(stop, read_contents), f"checkpointing.resume={config.checkpointing.resume}"
    if path is None:
        return None
    if config.value_model is not None and not (path / VALUE_FOLDER).is_dir():
        raise ConfigError([Problem(subject, f"{path} is not a checkpoint of PPO: it has no value model")])
    try:
        before = LoraConfig(**read_config_file(path.parent.parent / CONFIG_FILE)["policy"]["lora"]).description
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        before = None  # ranks compare their own adapters with those in the checkpoint
    now = config.policy.lora.description
    if before not in (None, now):
        text = f"{path} was written with {before}, and this run has {now}; choose another run_dir, or the same adapters"
        raise ConfigError([Problem(subject, text)])
    reason: str | None = None
    try:
        earlier_data = read_identity(path.parent.parent / DATA_FILE)
    except ValueError as error:
        reason = str(error)
    else:
        if earlier_data is not None:
            reason = find_training_difference(earlier_data, identify(config))
    if reason is not None:
        text = f"{path} has a position in other data: {reason}; to train its weights on this data, export it"
        raise ConfigError([Problem(subject, f"{text} (python -m megatron_grpo.export) and give policy.model.path")])
    _require_figures(checkpointer.folder.parent, subject)
    return path


def read_by_ranks(models: Mapping[str, ModelRanks]) -> files.ReadContents:
    """Make a reader of what ranks will load.

    `models`: by their folder in a checkpoint.
    """

    def read(folder: Path, expected: Mapping[Path, FileRecord]) -> Mapping[Path, FileRecord]:
        contents: dict[Path, FileRecord] = {}
        for name, model in models.items():
            paths = sorted(path for path in expected if path.parent == folder / name)
            records = model.record_files(str(folder / name), [path.name for path in paths])
            contents |= {path: records[path.name] for path in paths}
        return contents

    return read


def _require_figures(run_dir: Path, subject: str) -> None:
    """Require readable figures of earlier steps, which a resumed run continues."""
    try:
        read_metrics(run_dir)
        read_steps(run_dir / VALIDATION_FILE)
    except (ValueError, OSError) as error:
        text = f"continues the figures of {run_dir}, and {error}; mend or remove that line, or choose another run_dir"
        raise ConfigError([Problem(subject, text)]) from None


# Names that stand for a checkpoint of a run: the first by checkpointing.metric_name, and the last.
BEST, NEWEST = "best", ("newest", "latest")


def choose_ranking(config: Config) -> CheckpointingConfig:
    """Settings of checkpoints, ranked by reward where the run lacks the default."""
    settings, loop = config.checkpointing, config.loop
    validates = config.data.validation_sets and (loop.val_period or loop.val_at_start or loop.val_at_end)
    is_default = settings.metric_name == CheckpointingConfig().metric_name
    if is_default and config.method.rows and not config.needs_generation:
        return replace(settings, metric_name="val_loss" if validates else "loss", higher_is_better=False)
    if is_default and config.env and not config.method.rows and not config.has_correctness:
        return replace(settings, metric_name="val_reward" if validates else "reward", higher_is_better=True)
    if validates or settings.metric_name is None or not settings.metric_name.startswith(VALIDATION_PREFIX):
        return settings
    return replace(settings, metric_name="reward", higher_is_better=True)


def resolve_checkpoint(path: Path, key: str = "checkpoint") -> Path:
    """Find the checkpoint of a path, perhaps checkpoints/best or latest.

    `key`: name of the setting, for messages. Raises ValueError if the run of such a path has no checkpoint, or its
    configuration cannot be read.
    """
    if path.name not in (BEST, *NEWEST) or path.parent.resolve().name != CHECKPOINTS_FOLDER or path.exists():
        return path
    run_dir = path.parent.parent
    try:
        values = read_config_file(run_dir / CONFIG_FILE)
    except FileNotFoundError:
        raise ValueError(f"{key}={path}: {run_dir} is not the folder of a run: it has no {CONFIG_FILE}") from None
    config, problems = convert_values(values, choose_imported(values.get("algorithm")))
    if config is None:
        raise ConfigError(problems)
    checkpointer = Checkpointer(run_dir, choose_ranking(config), look_only=True)
    steps = checkpointer.list_steps()
    if not steps:
        raise ValueError(f"{key}={path}: {path.parent} has no checkpoint")
    if path.name in NEWEST:
        return checkpointer.locate(steps[-1])
    ranked = checkpointer.rank(steps)
    if not ranked:
        raise ValueError(f"{key}={path}: no checkpoint of {path.parent} has a state that can be read; name one")
    return checkpointer.locate(ranked[0])
