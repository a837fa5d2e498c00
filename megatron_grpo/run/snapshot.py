"""How far the driver has come at one moment, and writing that down with the models as a checkpoint."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.run.background_save import begin_saving
from megatron_grpo.run.context import SamplingRun
from megatron_grpo.run.save_state import GRPOSaveState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The driver's part of a checkpoint, as it was at one moment."""

    state: GRPOSaveState
    loader: dict[str, Any]
    """State of the loader of training prompts: its position in the data."""
    waiting: list[SampledGroup]
    """Groups that dynamic sampling keeps for the next step."""


def snapshot_of(run: SamplingRun) -> Snapshot:
    """A copy of the driver's part of a checkpoint, which later steps do not change."""
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
    groups = run.rollouts.fetch(snapshot.waiting)
    rows = [[trajectory.to_saved_row() for trajectory in group] for group in groups]
    state = {"save_state": snapshot.state, "metrics": dict(metrics), "batch_cache": rows}
    if run.config.checkpointing.async_save:
        begin_saving(run, step, state, snapshot.loader)
        run.logger.note(f"step {step} is being saved; the run went on after {time.monotonic() - started:.1f} s")
        return
    try:
        with run.checkpointer.writing(step, state, snapshot.loader) as folder:
            run.save_models(folder)
    except RunError:
        raise
    except (OSError, RuntimeError) as error:  # torch has its own for a disk that is full
        raise RunError(f"{run.checkpointer.path(step)} cannot be written: {error}") from error
    run.logger.note(f"saved {run.checkpointer.path(step)} in {time.monotonic() - started:.1f} s")


def save_validation(run: SamplingRun, metrics: Mapping[str, float]) -> None:
    """Add a validation to the checkpoint of the last step, which was written before it.

    Only what a validation changes: with dynamic sampling, what was sampled since is not in that checkpoint.

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
