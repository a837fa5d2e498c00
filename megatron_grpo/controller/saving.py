"""Saving a checkpoint: a snapshot of the driver's state, written with the models at once or beside training."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.controller.checkpoint_files import complete
from megatron_grpo.controller.context import SamplingRun
from megatron_grpo.controller.save_state import GRPOSaveState
from megatron_grpo.data.trajectory import SampledGroup


@dataclass(slots=True)
class PendingSave:
    """A checkpoint that is not complete yet, and under a temporary name."""

    step: int
    folder: Path
    state: Mapping[str, Any]
    loader_state: Mapping[str, Any]
    began: float = field(default_factory=time.monotonic)
    driver_files: Future[None] | None = None
    """The thread that writes the driver's files and the digests; None: ranks are still writing."""


def begin_saving(run: SamplingRun, step: int, state: Mapping[str, Any], loader_state: Mapping[str, Any]) -> None:
    """Begin to write the models as they are now; returns as soon as they may change.

    Args:
        step: training steps so far.
        state: what the driver needs to continue (JSON); must not be changed later.
        loader_state: state of the training data loader.

    Raises:
        RunError: the checkpoint before could not be written, or this one cannot.
    """
    finish_saving(run)
    with _errors_name_the_checkpoint(run, step):
        folder = run.checkpointer.begin(step)
        run.save_models(folder, background=True)
    run.checkpointer.pending = PendingSave(step, folder, state, loader_state)


def advance_saving(run: SamplingRun) -> None:
    """Continue a background save as far as possible without waiting.

    Raises:
        RunError: it could not be written.
    """
    pending = run.checkpointer.pending
    if pending is None:
        return
    if pending.driver_files is None:
        if all(model.checkpoint_is_written() for model in run.models()):
            _write_driver_files(run, pending)
    elif pending.driver_files.done():
        finish_saving(run)


def finish_saving(run: SamplingRun) -> None:
    """Wait until the checkpoint that is being written is complete, if there is one.

    Raises:
        RunError: it could not be written, and is given up. Earlier checkpoints are unchanged.
    """
    pending = run.checkpointer.pending
    if pending is None:
        return
    try:
        with _errors_name_the_checkpoint(run, pending.step):
            if pending.driver_files is None:
                _write_driver_files(run, pending)
            assert pending.driver_files is not None
            pending.driver_files.result()
            run.checkpointer.publish(pending.step, pending.folder)
    finally:
        run.checkpointer.pending = None
    seconds = time.monotonic() - pending.began
    run.logger.note(f"saved {run.checkpointer.path(pending.step)} beside training, {seconds:.1f} s after it began")


def _write_driver_files(run: SamplingRun, pending: PendingSave) -> None:
    """End the ranks' writing, then write the driver's files and the digests in a thread."""
    try:
        for model in run.models():
            model.finish_checkpoint()
    except RunError:
        run.checkpointer.pending = None
        raise
    pool = ThreadPoolExecutor(1, "checkpoint-digests")
    pending.driver_files = pool.submit(complete, pending.folder, pending.step, pending.state, pending.loader_state)
    pool.shutdown(wait=False)


@contextmanager
def _errors_name_the_checkpoint(run: SamplingRun, step: int) -> Iterator[None]:
    """Turn an error of the body's file operations into a RunError that names the checkpoint."""
    try:
        yield
    except RunError:
        raise
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError when the disk is full
        raise RunError(f"{run.checkpointer.path(step)} cannot be written: {error}") from error


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The driver's part of a checkpoint; later steps do not change it."""

    state: GRPOSaveState
    loader: dict[str, Any]
    """State of the loader of training prompts: its position in the data."""
    waiting: list[SampledGroup]
    """Groups that dynamic sampling keeps for the next step."""


def take_snapshot(run: SamplingRun) -> Snapshot:
    """Copy the driver's part of a checkpoint."""
    return Snapshot(
        state=copy.deepcopy(run.state),
        loader=copy.deepcopy(run.position()),
        waiting=list(run.samples.waiting),
    )


def save_checkpoint(run: SamplingRun, metrics: Mapping[str, float], snapshot: Snapshot) -> None:
    """Write everything a resumed run needs as checkpoints/step_N; with checkpointing.async_save, begin to.

    Args:
        metrics: metrics of the last step, which rank the checkpoint.
        snapshot: the driver's part of the checkpoint, after the last update of its models.

    Raises:
        RunError: a process of a model failed, or the folder cannot be written.
    """
    started = time.monotonic()
    step = snapshot.state["total_steps"]
    groups = run.rollouts.tokens.fetch(snapshot.waiting)
    rows = [[trajectory.to_saved_row() for trajectory in group] for group in groups]
    state = {"save_state": snapshot.state, "metrics": dict(metrics), "batch_cache": rows}
    if run.config.checkpointing.async_save:
        begin_saving(run, step, state, snapshot.loader)
        run.logger.note(f"step {step} is being saved; the run went on after {time.monotonic() - started:.1f} s")
        return
    with _errors_name_the_checkpoint(run, step), run.checkpointer.writing(step, state, snapshot.loader) as folder:
        run.save_models(folder)
    run.logger.note(f"saved {run.checkpointer.path(step)} in {time.monotonic() - started:.1f} s")


def save_validation(run: SamplingRun, metrics: Mapping[str, float]) -> None:
    """Add a validation to the checkpoint of the last step, which was written before it.

    Replaces only what a validation changes: groups that dynamic sampling has sampled since are not in that checkpoint.

    Raises:
        RunError: the checkpoint is damaged or cannot be written.
    """
    step = run.state["total_steps"]
    state, _ = run.checkpointer.load(run.checkpointer.path(step))
    state["metrics"] |= metrics
    for key in ("val_step", "val_reward", "val_accuracy", "early_stop"):
        state["save_state"][key] = run.state[key]
    try:
        run.checkpointer.update(step, state)
    except OSError as error:
        raise RunError(f"the validation cannot be added to {run.checkpointer.path(step)}: {error}") from error
