"""Checkpoints that are written while the run goes on: begun, looked after between steps, finished before the next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.run.checkpoint_files import complete
from megatron_grpo.run.context import SamplingRun


@dataclass(slots=True)
class PendingSave:
    """A checkpoint that is not complete yet, and under a temporary name."""

    step: int
    folder: Path
    state: Mapping[str, Any]
    loader_state: Mapping[str, Any]
    began: float = field(default_factory=time.monotonic)
    sealing: Future[None] | None = None
    """The driver's files and the digests, in a thread; None: ranks are still writing."""


def begin_saving(run: SamplingRun, step: int, state: Mapping[str, Any], loader_state: Mapping[str, Any]) -> None:
    """Have the models of this moment written; returns as soon as they may change.

    Args:
        step: training steps so far.
        state: what the driver needs to continue (JSON); nobody changes it later.
        loader_state: state of the training data loader.

    Raises:
        RunError: the checkpoint before could not be written, or this one cannot.
    """
    finish_saving(run)
    with _told(run, step):
        folder = run.checkpointer.begin(step)
        run.save_models(folder, background=True)
    run.checkpointer.pending = PendingSave(step, folder, state, loader_state)


def advance_saving(run: SamplingRun) -> None:
    """Go on with a checkpoint that is being written, as far as that makes nobody wait.

    Raises:
        RunError: it could not be written.
    """
    pending = run.checkpointer.pending
    if pending is None:
        return
    if pending.sealing is None:
        if all(model.checkpoint_is_written() for model in run.models()):
            _begin_sealing(run, pending)
    elif pending.sealing.done():
        finish_saving(run)


def finish_saving(run: SamplingRun) -> None:
    """Wait until the checkpoint that is being written is complete, if there is one.

    Raises:
        RunError: it could not be written. It is given up; the ones before it are as they were.
    """
    pending = run.checkpointer.pending
    if pending is None:
        return
    try:
        with _told(run, pending.step):
            if pending.sealing is None:
                _begin_sealing(run, pending)
            assert pending.sealing is not None
            pending.sealing.result()
            run.checkpointer.publish(pending.step, pending.folder)
    finally:
        run.checkpointer.pending = None
    seconds = time.monotonic() - pending.began
    run.logger.note(f"saved {run.checkpointer.path(pending.step)} beside training, {seconds:.1f} s after it began")


def _begin_sealing(run: SamplingRun, pending: PendingSave) -> None:
    """End the ranks' part, all of which are asked in one order, and read the files for the digests in a thread."""
    try:
        for model in run.models():
            model.finish_checkpoint()
    except RunError:
        run.checkpointer.pending = None
        raise
    pool = ThreadPoolExecutor(1, "checkpoint-seal")
    pending.sealing = pool.submit(complete, pending.folder, pending.step, pending.state, pending.loader_state)
    pool.shutdown(wait=False)


@contextmanager
def _told(run: SamplingRun, step: int) -> Iterator[None]:
    """Makes a RunError of what goes wrong with the files of a checkpoint."""
    try:
        yield
    except RunError:
        raise
    except (OSError, RuntimeError) as error:  # torch has its own for a disk that is full
        raise RunError(f"{run.checkpointer.path(step)} cannot be written: {error}") from error
