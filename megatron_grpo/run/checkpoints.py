"""Checkpoints of a run: finding the one to start from, writing one atomically, deleting those beyond keep_top_k."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.conversion import convert_values
from megatron_grpo.config.errors import ConfigError, ModelLostError, Problem, RunError
from megatron_grpo.config.schema import CheckpointingConfig, Config, LoraConfig
from megatron_grpo.data.identity import identify, read_identity, training_difference
from megatron_grpo.observability.run_files import sync
from megatron_grpo.run.checkpoint_files import (
    MANIFEST_FILE,
    STATE_FILE,
    CheckpointError,
    finalize,
    read_state,
    replace_state,
    verify_checkpoint,
)
from megatron_grpo.run.directory import CONFIG_FILE, DATA_FILE, VALUE_FOLDER, read_config_file

if TYPE_CHECKING:
    from megatron_grpo.trainer.model_ranks import ModelRanks

_DAMAGED = "damaged_step_"
_LEAST_FREE = 2**20
"""Free bytes of a disk below which a failed write is explained by the disk being full."""


@dataclass(slots=True)
class PendingSave:
    """A checkpoint that is being written under a temporary name."""

    step: int
    folder: Path
    state: Mapping[str, Any]
    loader_state: Mapping[str, Any]
    writers: Sequence[ModelRanks]
    """Models whose ranks write in the background."""
    began: float
    """time.monotonic() when the save began."""
    driver_files: Future[None] | None = None
    """The thread that writes the driver's files and the digests; None: ranks are still writing."""


class Checkpointer:
    """The folder run_dir/checkpoints. One process, the driver, owns it.

    Args:
        run_dir: folder of the run.
        config: where to start from, and which checkpoints to keep.
        look_only: let `find` only say which damaged checkpoints it would set aside.
    """

    def __init__(self, run_dir: Path, config: CheckpointingConfig, *, look_only: bool = False) -> None:
        self.config, self._look_only = config, look_only
        self.keep_forever: Callable[[int], bool] = lambda step: False
        """Says which checkpoints, by step, are never deleted."""
        self.on_publish: Callable[[int, Path], None] = lambda step, folder: None
        """Called for every checkpoint that is complete."""
        self.note: Callable[[str], None] = lambda text: None
        """Takes messages for the user about what was saved."""
        self.pending: PendingSave | None = None
        """The checkpoint that is being written while the run goes on."""
        self.folder = run_dir / "checkpoints"

    def find_start(self, stop: Event | None = None) -> Path | None:
        """Find the checkpoint to start from according to checkpointing.resume, and verify all its files.

        A run that started from another run's checkpoint and has saved since continues from its own newest intact one,
        because a job that is queued again has the same command line. Newer checkpoints of its own are damaged: they are
        renamed (set aside), and standard error says which and why.

        Args:
            stop: event that another thread sets to end the search early, with CancelledError.

        Raises:
            ConfigError: the named folder is not an intact checkpoint, no checkpoint of the run directory is intact, or
                it has later checkpoints than the one to start from, which this run would mix with its own.
            RunError: a file cannot be read, or a later version wrote the checkpoint.
        """
        resume, steps = self.config.resume, self.list_steps()
        path = None if resume in ("auto", "none") else Path(resume).resolve()
        of_another_run = path is not None and path.parent != self.folder.resolve()
        if resume == "auto" or (of_another_run and (steps or self._set_aside())):
            return self._newest_intact(stop)
        begin = 0
        if path is not None:
            self._require_intact(path, stop)
            begin = 0 if of_another_run else read_state(path)["save_state"]["total_steps"]
        if steps and steps[-1] > begin:
            text = (
                f"would go on after step {begin}, and {self.folder} has later checkpoints, up to step {steps[-1]}; "
                "choose another run_dir, or delete them"
            )
            raise ConfigError([Problem(f"checkpointing.resume={resume}", text)])
        return path

    def list_steps(self) -> list[int]:
        """Steps of the run's checkpoints in ascending order; their files are not verified."""
        names = (entry.name.removeprefix("step_") for entry in self.folder.glob("step_*"))
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def locate(self, step: int) -> Path:
        """Folder of the checkpoint after `step` steps."""
        return self.folder / f"step_{step}"

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        loader_state: Mapping[str, Any],
        models: Mapping[str, ModelRanks],
        *,
        background: bool = False,
    ) -> None:
        """Complete the pending checkpoint, then begin to write checkpoint `step`, which `finish` completes.

        Files go to a folder with a temporary name, which has the process id because writers of a killed run may still
        be at work. The folder is renamed when all files are on disk, last the manifest with their digests, so a
        checkpoint that can be found is complete.

        Args:
            step: training steps so far.
            state: what the driver needs to continue (JSON); must not be changed until `finish`.
            loader_state: state of the training data loader.
            models: trained models, by their folder in the checkpoint.
            background: let ranks write in the background, and return as soon as the models may change.

        Raises:
            RunError: this checkpoint, or the pending one, could not be written.
        """
        self.finish()
        folder, began = self.folder / f".writing_step_{step}_{os.getpid()}", time.monotonic()
        with self._writing(step, folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for name, model in models.items():
                (folder / name).mkdir()
                model.save_checkpoint(str(folder / name), background=background)
        self.pending = PendingSave(
            step, folder, state, loader_state, list(models.values()) if background else [], began
        )

    def advance(self) -> None:
        """Advance the pending checkpoint as far as possible without waiting.

        Raises:
            RunError: it could not be written.
        """
        pending = self.pending
        if pending is None:
            return
        if pending.driver_files is None:
            if all(model.checkpoint_is_written() for model in pending.writers):
                with self._writing(pending.step, pending.folder):
                    for model in pending.writers:
                        model.finish_checkpoint()
                pool = ThreadPoolExecutor(1, "checkpoint-digests")
                files = (pending.folder, pending.step, pending.state, pending.loader_state)
                pending.driver_files = pool.submit(finalize, *files)
                pool.shutdown(wait=False)
        elif pending.driver_files.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the pending checkpoint is complete, then delete checkpoints beyond keep_top_k.

        Raises:
            RunError: the checkpoint could not be written and is abandoned. Earlier checkpoints are unchanged.
        """
        pending = self.pending
        if pending is None:
            return
        with self._writing(pending.step, pending.folder):
            if pending.driver_files is None:
                for model in pending.writers:
                    model.finish_checkpoint()
                finalize(pending.folder, pending.step, pending.state, pending.loader_state)
            else:
                pending.driver_files.result()
            self._remove(pending.step)
            pending.folder.rename(self.locate(pending.step))
            sync(self.folder)
            self._prune()
            self.on_publish(pending.step, self.locate(pending.step))
        self.pending = None
        seconds = time.monotonic() - pending.began
        how = f"in the background, {seconds:.1f} s after it began" if pending.writers else f"in {seconds:.1f} s"
        self.note(f"saved {self.locate(pending.step)} {how}")

    @contextmanager
    def _writing(self, step: int, folder: Path) -> Iterator[None]:
        """Turn an error of the body's file operations into a RunError that names the checkpoint.

        After any error nothing is pending, and the incomplete folder is removed, which leaves room for the summary on a
        full disk.
        """
        try:
            yield
        except BaseException as error:
            self.pending = None
            full = self.folder.is_dir() and shutil.disk_usage(self.folder).free < _LEAST_FREE
            shutil.rmtree(folder, ignore_errors=True)
            told = isinstance(error, ModelLostError) or (isinstance(error, RunError) and not full)
            if told or not isinstance(error, OSError | RuntimeError):  # torch raises RuntimeError when the disk is full
                raise
            reason, steps = "the disk is full" if full else error, self.list_steps()
            last = f"{self.locate(steps[-1])} is the last checkpoint" if steps else "there is no earlier checkpoint"
            raise RunError(f"{self.locate(step)} cannot be written: {reason}; {last}") from error

    def replace_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Atomically replace the driver's state in a checkpoint, then prune: new metrics may change the ranking."""
        replace_state(self.locate(step), state)
        self._prune()

    def remove_leftovers(self) -> None:
        """Delete folders that an interrupted write or removal left behind."""
        for pattern in (".writing_step_*", ".removing_step_*"):
            for entry in self.folder.glob(pattern):
                shutil.rmtree(entry, ignore_errors=True)

    def _newest_intact(self, stop: Event | None) -> Path | None:
        """The newest intact checkpoint, with the damaged ones above it set aside; None: the run has saved nothing.

        Raises:
            ConfigError: there are checkpoints, all damaged. Nothing is renamed then: a second try must not find an
                empty folder and begin anew over the run's files.
        """
        damaged: dict[int, CheckpointError] = {}
        for step in reversed(self.list_steps()):
            try:
                remark = verify_checkpoint(self.locate(step), stop)
            except CheckpointError as error:
                damaged[step] = error
                continue
            except OSError as error:  # the content may be intact, and readable at another try
                text = "make it readable, or rename it to go on from the one before"
                raise RunError(f"{self.locate(step)} cannot be read: {error}; {text}") from None
            for bad_step, reason in damaged.items():
                _tell(f"{reason}; {self.locate(bad_step)} {self._put_aside(bad_step)}")
            if damaged:
                verb = "would go on" if self._look_only else "going on"
                _tell(f"{verb} from {self.locate(step)}, the newest checkpoint that is intact")
            if remark:
                _tell(remark)
            return self.locate(step)
        if not (damaged or self._set_aside()):
            return None
        found = [str(error) for error in damaged.values()] or [f"{path} was set aside" for path in self._set_aside()]
        text = (
            f"finds no intact checkpoint in {self.folder}, and will not begin anew over what this run has written: "
            f"{'; '.join(found)}. Put intact files back, or begin in another run_dir"
        )
        raise ConfigError([Problem(f"checkpointing.resume={self.config.resume}", text)])

    def _require_intact(self, path: Path, stop: Event | None) -> None:
        """Check the checkpoint that checkpointing.resume names.

        Raises:
            ConfigError: the folder is not a checkpoint, or a damaged one.
        """
        subject = f"checkpointing.resume={self.config.resume}"
        try:
            if not (path / STATE_FILE).is_file() and not (path / MANIFEST_FILE).is_file():
                raise ConfigError([Problem(subject, f"is not a checkpoint: it has no {STATE_FILE}")])
            remark = verify_checkpoint(path, stop)
        except CheckpointError as error:
            raise ConfigError([Problem(subject, f"cannot be started from: {error}; name another checkpoint")]) from None
        except OSError as error:
            raise ConfigError([Problem(subject, f"cannot be read: {error}")]) from None
        if remark:
            _tell(remark)

    def _set_aside(self) -> list[Path]:
        """The damaged checkpoints that earlier starts have set aside."""
        return sorted(self.folder.glob(f"{_DAMAGED}*"))

    def _put_aside(self, step: int) -> str:
        """Rename a damaged checkpoint so that it is neither found, counted nor deleted; returns words for a message."""
        if self._look_only:
            return "would be set aside"
        target, again = self.folder / f"{_DAMAGED}{step}", 1
        while target.exists():
            again += 1
            target = self.folder / f"{_DAMAGED}{step}.{again}"
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
        for step in {*self.rank(steps)[self.config.keep_top_k :]} - {steps[-1]}:
            if not self.keep_forever(step):
                self._remove(step)

    def rank(self, steps: Sequence[int]) -> list[int]:
        """Steps of checkpoints that can be read, the best first; of equal ones the newest."""
        scores = {step: score for step in steps if (score := self._score(step)) is not None}
        return sorted(scores, key=lambda step: (scores[step], step), reverse=True)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint if it exists; it is renamed first, so that a checkpoint that can be found is complete."""
        if self.locate(step).exists():
            temporary = self.folder / f".removing_step_{step}"
            shutil.rmtree(temporary, ignore_errors=True)
            self.locate(step).rename(temporary)
            shutil.rmtree(temporary)

    def _score(self, step: int) -> float | None:
        """Score of a checkpoint, higher is better; -inf without a finite metric. None: unreadable, so it is kept."""
        if self.config.metric_name is None:
            return float(step)
        try:
            value = read_state(self.locate(step))["metrics"].get(self.config.metric_name)
        except (CheckpointError, OSError):
            return None
        if not isinstance(value, int | float) or not math.isfinite(value):  # NaN cannot be sorted
            return -math.inf
        return float(value) if self.config.higher_is_better else -float(value)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # flushed, so that a start that fails later does not rename in silence


def find_start_checkpoint(checkpointer: Checkpointer, config: Config, stop: Event | None = None) -> Path | None:
    """Find the checkpoint to start from, with the models and adapters that the run trains.

    Raises:
        ConfigError: checkpointing.resume selects no usable checkpoint, one without the value model of PPO, or one of a
            run with other adapters.
        RunError: a file cannot be read.
    """
    path, subject = checkpointer.find_start(stop), f"checkpointing.resume={config.checkpointing.resume}"
    if path is not None and config.value_model is not None and not (path / VALUE_FOLDER).is_dir():
        raise ConfigError([Problem(subject, f"{path} is not a checkpoint of PPO: it has no value model")])
    before, now = None if path is None else _adapters_of_run(path), config.policy.lora.description
    if before not in (None, now):
        text = f"{path} was written with {before}, and this run has {now}; choose another run_dir, or the same adapters"
        raise ConfigError([Problem(subject, text)])
    reason = None if path is None else _other_data(path, config)
    if reason is not None:
        text = f"{path} has a position in other data: {reason}; to train its weights on this data, export it"
        raise ConfigError([Problem(subject, f"{text} (python -m megatron_grpo.export) and give policy.model.path")])
    return path


def _other_data(checkpoint: Path, config: Config) -> str | None:
    """The difference of the data from that of a checkpoint's run; None: there is none, or that is not known."""
    try:
        before = read_identity(checkpoint.parent.parent / DATA_FILE)
    except ValueError as error:
        return str(error)
    return None if before is None else training_difference(before, identify(config))


BEST, NEWEST = "best", "newest"
"""Names that stand for a checkpoint of a run: the one that checkpointing.metric_name ranks first, and the last one."""


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names, which may be RUN_DIR/checkpoints/best or RUN_DIR/checkpoints/newest.

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


def _adapters_of_run(checkpoint: Path) -> str | None:
    """The adapters with which a checkpoint's run was last started; None: the checkpoint is not in a run's folder."""
    try:
        lora = read_config_file(checkpoint.parent.parent / CONFIG_FILE)["policy"]["lora"]
        return LoraConfig(**lora).description
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None  # ranks compare their own adapters with those in the checkpoint
