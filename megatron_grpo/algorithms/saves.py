"""The checkpoints that a loop writes, after a step or before a failure ends the run."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_grpo.algorithms.context import GRPOSaveState, SamplingRun
from megatron_grpo.algorithms.step_report import StepReport, log_step
from megatron_grpo.batch.trajectory import SampledGroup
from megatron_grpo.config.data_schema import ENVIRONMENT_PREFIX
from megatron_grpo.config.errors import DisagreementError, ModelLostError, RunError, SamplingError
from megatron_grpo.config.loop_schema import VALIDATION_PREFIX
from megatron_grpo.config.metric_names import list_optional_metrics
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.run.checkpoint_files import read_state
from megatron_grpo.run.checkpoints import choose_ranking
from megatron_grpo.run.directory import STOP_FILE


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The driver's part of a checkpoint, which later steps do not change."""

    state: GRPOSaveState
    loader_state: dict[str, Any]  # position in the training data
    batch_cache: list[SampledGroup]  # groups that dynamic sampling keeps for the next step

    @staticmethod
    def from_run(run: SamplingRun) -> Snapshot:
        """Copy the driver's part of a checkpoint."""
        # Deep copies: with async_save the run goes on while the state is being written.
        return Snapshot(copy.deepcopy(run.state), copy.deepcopy(run.loader_state), list(run.batch_cache))


def save_checkpoint(
    run: SamplingRun, metrics: Mapping[str, float], snapshot: Snapshot | None = None, *, wait: bool = False
) -> None:
    """Write checkpoints/step_N; with checkpointing.async_save only begin it.

    Models are written as they are now. `snapshot`: the driver's part as it was after their last update; None: as now.
    `metrics` of the last step rank the checkpoint. With `wait` the checkpoint is complete on return.
    """
    started = time.monotonic()
    snapshot = snapshot or Snapshot.from_run(run)
    step, background = snapshot.state["total_steps"], run.config.checkpointing.async_save
    groups = run.rollouts.fetch(snapshot.batch_cache)
    rows = [[trajectory.to_saved_row() for trajectory in group] for group in groups]
    state = {"save_state": snapshot.state, "metrics": dict(metrics), "batch_cache": rows}
    run.placement.offload_engines(StepTimer())
    images = {image.digest for group in groups for rollout in group for image in rollout.images}
    run.checkpointer.begin(step, state, snapshot.loader_state, run.models, images=images, background=background)
    if background:
        run.logger.note(f"step {step} is being saved; the run went on after {time.monotonic() - started:.1f} s")
    if wait or not background:
        run.checkpointer.finish()


def save_validation(run: SamplingRun, metrics: Mapping[str, float]) -> None:
    """Add a validation to the last step's checkpoint, which was written before it."""
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


def require_ranking_metric(run: SamplingRun, metrics: Mapping[str, float]) -> None:
    """Check that steps have the metric of checkpointing.metric_name."""
    config, step = run.config, run.state["total_steps"]
    name = choose_ranking(config).metric_name
    is_ranked = config.has_checkpoints and choose_ranking(config).keep_top_k is not None
    if not is_ranked or name is None or name in metrics or name.startswith(VALIDATION_PREFIX):
        return
    if name.startswith(ENVIRONMENT_PREFIX):
        figures = ", ".join(sorted(metric for metric in metrics if metric.startswith(ENVIRONMENT_PREFIX))) or "none"
        text = f"checkpointing.metric_name={name} ranks checkpoints, and step {step} has no such figure; it has"
        if step == 1:
            raise RunError(f"{text} {figures}")
        run.logger.note_once("ranking", f"{text} {figures}. Checkpoints of such steps rank last")
    # A step that does not train the policy, as in the critic's warm-up, lacks many metrics.
    elif metrics["optimizer_steps"] and name not in list_optional_metrics(config):
        names = ", ".join(sorted(metrics))
        raise RunError(f"checkpointing.metric_name={name} ranks checkpoints, and is not a metric of a step: {names}")


def save_finished_steps(run: SamplingRun, metrics: Mapping[str, float], snapshot: Snapshot | None = None) -> None:
    """Save the finished steps before a failure ends the run, if possible."""
    step = run.state["total_steps"]
    if step == 0 or not run.config.has_checkpoints:
        return
    with _note_failures(run, f"step {step} could not be saved"):
        run.checkpointer.finish()
        if step not in run.checkpointer.list_steps():
            save_checkpoint(run, metrics, snapshot, wait=True)


@contextmanager
def _note_failures(run: SamplingRun, text: str) -> Iterator[None]:
    # A failure of the body is only noted, because an earlier failure is about to be raised.
    try:
        yield
    except RunError as error:
        run.logger.note(f"{text}: {error}")


@contextmanager
def save_before_failure(run: SamplingRun, metrics: Mapping[str, float]) -> Iterator[None]:
    """Save the finished steps if the step in the body fails."""
    # Sampling advances the counts and the loader, so the state to save is that from before the step.
    before, began = Snapshot.from_run(run), time.monotonic()
    try:
        yield
    except SamplingError as error:
        save_finished_steps(run, metrics, before)
        if isinstance(error, DisagreementError):
            step, seconds = before.state["total_steps"] + 1, time.monotonic() - began
            run.logger.log_step(step, error.metrics, {"total": seconds}, {})
        raise


def end_after_step(run: SamplingRun, report: StepReport, failure: RunError) -> NoReturn:
    """Log and save the last step, and raise the failure."""
    with _note_failures(run, "the rollouts of the last step could not be written"):
        log_step(run, report, report.metrics)
    if not isinstance(failure, ModelLostError):
        save_finished_steps(run, report.metrics)
    raise failure


@contextmanager
def complete_files(run: SamplingRun) -> Iterator[None]:
    """Complete rollouts and checkpoint if the body fails."""
    try:
        yield
    except KeyboardInterrupt as error:
        stop_file = run.run_dir / STOP_FILE
        error.add_note(f"{_describe_continuation(run)}; `touch {stop_file}` would have ended it after a step, saved")
        raise
    except OSError as error:  # a full disk, or the run's folder is gone
        file, reason = error.filename or run.run_dir, error.strerror or error
        raise RunError(f"{file} cannot be written: {reason}; {_describe_continuation(run)}") from error
    except RunError as error:
        with _note_failures(run, "the rollouts of the step that failed could not be written"):
            run.dumps.write_all()
        if isinstance(error, ModelLostError) and run.can_restart:
            raise
        with _note_failures(run, "the checkpoint that was being written could not be completed"):
            run.checkpointer.finish()
        with _note_failures(run, "the last checkpoint was not sent"):
            run.checkpointer.uploads.finish()
        if isinstance(error, ModelLostError):
            raise ModelLostError(f"{error}; {_describe_continuation(run)}") from error
        if isinstance(error, DisagreementError):
            raise DisagreementError(f"{error}; {_describe_continuation(run)}", error.metrics) from error
        raise


def _describe_continuation(run: SamplingRun) -> str:
    steps = run.checkpointer.list_steps()
    if not steps:
        return "there is no checkpoint: the run begins anew when it is started again"
    return f"checkpoints/step_{max(steps)} is the last one: the run goes on from there when it is started again"
