"""The checkpoints that a loop writes: the driver's part, after a step or before a failure."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_grpo.algorithms.context import GRPOSaveState, SamplingRun
from megatron_grpo.batch.trajectory import SampledGroup
from megatron_grpo.config.data_schema import ENVIRONMENT_FIGURE
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.loop_schema import VALIDATION_PREFIX
from megatron_grpo.config.metric_names import list_optional_metrics
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.run.checkpoint_files import read_state


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The driver's part of a checkpoint, which later steps do not change."""

    state: GRPOSaveState
    loader_state: dict[str, Any]
    """State of the loader of training prompts: its position in the data."""
    batch_cache: list[SampledGroup]
    """Groups that dynamic sampling keeps for the next step."""

    @staticmethod
    def from_run(run: SamplingRun) -> Snapshot:
        """Copy the driver's part of a checkpoint."""
        # Deep copies: with async_save the run goes on while the state is being written.
        return Snapshot(copy.deepcopy(run.state), copy.deepcopy(run.loader_state), list(run.batch_cache))


def save_checkpoint(
    run: SamplingRun, metrics: Mapping[str, float], snapshot: Snapshot | None = None, *, wait: bool = False
) -> None:
    """Write checkpoints/step_N; with checkpointing.async_save only begin it.

    Args:
        run: the run, whose models are written as they are now.
        metrics: metrics of the last step, which rank the checkpoint.
        snapshot: the driver's part, after the last update of the models; None: as it is now.
        wait: return only when the checkpoint is complete.
    """
    started = time.monotonic()
    snapshot = snapshot or Snapshot.from_run(run)
    step, background = snapshot.state["total_steps"], run.config.checkpointing.async_save
    groups = run.rollouts.fetch(snapshot.batch_cache)
    rows = [[trajectory.to_saved_row() for trajectory in group] for group in groups]
    state = {"save_state": snapshot.state, "metrics": dict(metrics), "batch_cache": rows}
    run.placement.offload_engines(StepTimer())
    run.checkpointer.begin(step, state, snapshot.loader_state, run.models, background=background)
    if background:
        run.logger.note(f"step {step} is being saved; the run went on after {time.monotonic() - started:.1f} s")
    if wait or not background:
        run.checkpointer.finish()


def save_validation(run: SamplingRun, metrics: Mapping[str, float]) -> None:
    """Add a validation to the last step's checkpoint, which is older."""
    step = run.state["total_steps"]
    state = read_state(run.checkpointer.locate(step))
    state["metrics"] |= metrics
    # Only these depend on a validation: the rest of the state may have advanced since the checkpoint.
    for key in ("val_step", "val_reward", "val_accuracy", "early_stop"):
        state["save_state"][key] = run.state[key]
    try:
        run.checkpointer.replace_state(step, state)
    except OSError as error:
        raise RunError(f"the validation cannot be added to {run.checkpointer.locate(step)}: {error}") from error


def save_finished_steps(run: SamplingRun, metrics: Mapping[str, float], snapshot: Snapshot | None = None) -> None:
    """Save before a failure ends the run, if that is possible."""
    step = run.state["total_steps"]
    if step == 0 or not run.config.has_checkpoints:
        return
    with note_failures(run, f"step {step} could not be saved"):
        run.checkpointer.finish()
        if step not in run.checkpointer.list_steps():
            save_checkpoint(run, metrics, snapshot, wait=True)


@contextmanager
def note_failures(run: SamplingRun, text: str) -> Iterator[None]:
    """Note a RunError of the body; an earlier failure is raised."""
    try:
        yield
    except RunError as error:
        run.logger.note(f"{text}: {error}")


def require_ranking_metric(run: SamplingRun, metrics: Mapping[str, float]) -> None:
    """Check that steps have the metric of checkpointing.metric_name."""
    config, step = run.config, run.state["total_steps"]
    name, is_ranked = (
        config.ranked_checkpointing.metric_name,
        config.has_checkpoints and config.ranked_checkpointing.keep_top_k is not None,
    )
    if not is_ranked or name is None or name in metrics or name.startswith(VALIDATION_PREFIX):
        return
    if name.startswith(ENVIRONMENT_FIGURE):
        figures = ", ".join(sorted(metric for metric in metrics if metric.startswith(ENVIRONMENT_FIGURE))) or "none"
        text = (
            f"checkpointing.metric_name={name} ranks checkpoints, and step {step} has no such figure; it has {figures}"
        )
        if step == 1:
            raise RunError(text)
        run.logger.note_once("ranking", f"{text}. Checkpoints of such steps rank last")
    # A step that does not train the policy, as in the critic's warm-up, lacks many metrics.
    elif metrics["optimizer_steps"] and name not in list_optional_metrics(config):
        names = ", ".join(sorted(metrics))
        raise RunError(f"checkpointing.metric_name={name} ranks checkpoints, and is not a metric of a step: {names}")
