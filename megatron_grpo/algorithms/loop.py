"""The loop around the steps of an algorithm: limits, validation, reports, checkpoints."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_grpo.algorithms.context import GRPOSaveState, SamplingRun, SomeRun
from megatron_grpo.algorithms.validation import find_stop_reason, update_early_stop, validate
from megatron_grpo.batch.trajectory import Outcome, SampledGroup
from megatron_grpo.config.data_schema import ENVIRONMENT_FIGURE
from megatron_grpo.config.errors import DisagreementError, ModelLostError, RunError, SamplingError
from megatron_grpo.config.loop_schema import VALIDATION_PREFIX
from megatron_grpo.config.metric_names import list_optional_metrics
from megatron_grpo.data.loader import prompt_batches
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.scores import TrainerState
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.failures import describe_failures
from megatron_grpo.run.checkpoint_files import read_state
from megatron_grpo.run.directory import STOP_FILE

PROFILES_FOLDER = "profiles"


@dataclass(frozen=True, slots=True)
class StepReport:
    """Metrics and samples of one step, for the files and the progress line."""

    metrics: dict[str, float]
    timing: dict[str, float]
    throughput: dict[str, float]
    sampled: list[Outcome]
    """Outcomes of all sampled responses, including those that dynamic sampling dropped."""
    remarks: Sequence[str] = ()
    """Messages for the progress output."""
    failure: RunError | None = None
    """Error raised after the models were updated: the step still counts, then the run ends."""
    saves: bool = False
    """Whether a checkpoint is written after the step, whatever its number."""


StepFunction = Callable[[SomeRun, Iterator[list[DatumSpec]]], StepReport | None]
"""One step of an algorithm on the next prompts; None: the prompts are used up."""


def train_steps(run: SomeRun, step: StepFunction[SomeRun]) -> None:
    """Train until a limit is reached, early stopping ends it or the prompts are used up.

    Raises:
        SamplingError: sampling or scoring failed, or training and generation disagree too much; the finished steps were
            saved first.
        RefitError: the weights of a step could not be published; that step was saved first.
        ModelLostError: a rank of a model is gone, and all training since the last checkpoint is lost.
        RunError: a step failed, or a file of the run cannot be written; the message says which.
    """
    try:
        _train_steps(run, step)
    except KeyboardInterrupt as error:
        error.add_note(_where_to_continue(run))
        raise
    except OSError as error:  # a full disk, or the run's folder is gone
        file, reason = error.filename or run.run_dir, error.strerror or error
        raise RunError(f"{file} cannot be written: {reason}; {_where_to_continue(run)}") from error
    except RunError as error:
        with _only_noted(run, "the rollouts of the step that failed could not be written"):
            run.dumps.write_all()
        with _only_noted(run, "the checkpoint that was being written could not be completed"):
            run.checkpointer.finish()
        if isinstance(error, ModelLostError):
            raise ModelLostError(f"{error}; {_where_to_continue(run)}") from error
        if isinstance(error, DisagreementError):
            raise DisagreementError(f"{error}; {_where_to_continue(run)}", error.metrics) from error
        raise


def _train_steps(run: SomeRun, step: StepFunction[SomeRun]) -> None:
    limits, state = run.config.training_loop, run.state
    _tell_progress(run)
    run.callbacks.notify("on_start", state["total_steps"], run.run_dir)
    _catch_up_on_validation(run)
    batches = prompt_batches(run.loader, limits.max_num_epochs)
    metrics: dict[str, float] = {}
    while state["total_steps"] < limits.max_num_steps and not _stopped_early(run):
        before, began = Snapshot.of(run), time.monotonic()
        _tell_progress(run)
        try:
            with _profiled(run, state["total_steps"] + 1):
                report = step(run, batches)
        except SamplingError as error:
            _save_finished_steps(run, metrics, before)
            if isinstance(error, DisagreementError):
                number, seconds = before.state["total_steps"] + 1, time.monotonic() - began
                run.logger.log_step(number, error.metrics, {"total": seconds}, {})
            raise
        if report is None:
            run.logger.end_early("data_used_up", run.end_of_data)
            run.logger.note(run.end_of_data)
            break
        _advance(run, report)
        metrics = _finish_step(run, report)
        run.checkpointer.advance()
    _finish_training(run, metrics)
    run.callbacks.notify("on_end", state["total_steps"])


@contextmanager
def _only_noted(run: SamplingRun, what: str) -> Iterator[None]:
    """Report a RunError of the body as a note instead of raising it, since the run ends with an earlier failure."""
    try:
        yield
    except RunError as error:
        run.logger.note(f"{what}: {error}")


@contextmanager
def _profiled(run: SamplingRun, step: int) -> Iterator[None]:
    """Profile the kernels of all ranks during the body if logger.profile_steps has this step; this slows the step."""
    if step not in run.config.logger.profile_steps:
        yield
        return
    models = run.models().values()
    for model in models:
        model.begin_profile()
    yield
    folder = run.logger.run_dir / PROFILES_FOLDER / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        model.end_profile(str(folder))
    run.logger.note(f"step {step}: profiles in {folder}")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the driver's part of a checkpoint, which later steps do not change."""

    state: GRPOSaveState
    loader: dict[str, Any]
    """State of the loader of training prompts: its position in the data."""
    waiting: list[SampledGroup]
    """Groups that dynamic sampling keeps for the next step."""

    @staticmethod
    def of(run: SamplingRun) -> Snapshot:
        """Copy the driver's part of a checkpoint."""
        return Snapshot(copy.deepcopy(run.state), copy.deepcopy(run.loader_state()), list(run.batch_cache))


def _save(run: SamplingRun, metrics: Mapping[str, float], snapshot: Snapshot, *, wait: bool = False) -> None:
    """Write the checkpoint checkpoints/step_N; with checkpointing.async_save only begin to write it.

    Args:
        run: the run, whose models are written as they are now.
        metrics: metrics of the last step, which rank the checkpoint.
        snapshot: the driver's part of the checkpoint, after the last update of its models.
        wait: return only when the checkpoint is complete.

    Raises:
        RunError: a process of a model failed, or the folder cannot be written.
    """
    started = time.monotonic()
    step, background = snapshot.state["total_steps"], run.config.checkpointing.async_save
    groups = run.rollouts.fetch(snapshot.waiting)
    rows = [[trajectory.to_saved_row() for trajectory in group] for group in groups]
    state = {"save_state": snapshot.state, "metrics": dict(metrics), "batch_cache": rows}
    run.placement.offload_engines(StepTimer())
    run.checkpointer.begin(step, state, snapshot.loader, run.models(), background=background)
    if background:
        run.logger.note(f"step {step} is being saved; the run went on after {time.monotonic() - started:.1f} s")
    if wait or not background:
        run.checkpointer.finish()


def _save_validation(run: SamplingRun, metrics: Mapping[str, float]) -> None:
    """Add the results of a validation to the checkpoint of the last step, which was written before the validation.

    Replaces only the entries that a validation changes: the rest of the state may have advanced since the checkpoint.

    Raises:
        RunError: the checkpoint is damaged or cannot be written.
    """
    step = run.state["total_steps"]
    state = read_state(run.checkpointer.locate(step))
    state["metrics"] |= metrics
    for key in ("val_step", "val_reward", "val_accuracy", "early_stop"):
        state["save_state"][key] = run.state[key]
    try:
        run.checkpointer.replace_state(step, state)
    except OSError as error:
        raise RunError(f"the validation cannot be added to {run.checkpointer.locate(step)}: {error}") from error


def _tell_progress(run: SamplingRun) -> None:
    """Give rollout workers the progress of the run, which reward functions can read."""
    limits, state = run.config.training_loop, run.state
    run.rollouts.trainer_state = TrainerState(
        global_step=state["total_steps"],
        max_steps=limits.max_num_steps,
        epoch=float(state["current_epoch"]),
        num_train_epochs=limits.max_num_epochs,
    )


def _catch_up_on_validation(run: SamplingRun) -> None:
    """Validate before the next step if that is due: at the start, or because the last validation failed."""
    step = run.state["total_steps"]
    due = run.config.training_loop.val_at_start if step == 0 else _periodic_validation_due(run)
    if not due or run.state.get("val_step") == step:
        return
    validated = _validated(run)
    if validated and step in run.checkpointer.list_steps():
        _save_validation(run, validated)


def _stopped_early(run: SamplingRun) -> bool:
    reason = find_stop_reason(run.state["early_stop"], run.config.training_loop.early_stop)
    if reason is None and run.callbacks.wants_stop:
        reason = "a callback of the script says so"
    if reason is None and _asked_to_stop(run):
        reason = f"the file {STOP_FILE} is in the run's folder"
    if reason is not None:
        run.logger.end_early("early_stop", reason)
        run.logger.note(f"training ends after step {run.state['total_steps']}: {reason}")
    return reason is not None


def _asked_to_stop(run: SamplingRun) -> bool:
    """Whether somebody wants the run to end soon: a person, or Slurm before the job's time is up."""
    return (run.logger.run_dir / STOP_FILE).exists()


def _advance(run: SamplingRun, report: StepReport) -> None:
    state, epoch = run.state, run.loader_state()["epoch"]
    if epoch > state["current_epoch"]:
        state["current_epoch"] = epoch
        state["current_step"] = 0
    state["total_steps"] += 1
    state["current_step"] += 1
    state["total_valid_tokens"] += int(report.metrics["valid_tokens"])


def _finish_step(run: SamplingRun, report: StepReport) -> dict[str, float]:
    """Validate if due, log the step, save if due; returns the step's metrics, including those of the validation.

    Raises:
        RunError: the step's weights were not published, the validation failed, or checkpoints cannot be ranked; the
            step was logged and saved.
    """
    step, loop, metrics = run.state["total_steps"], run.config.training_loop, dict(report.metrics)
    failure = report.failure
    if failure is not None:  # noted before saving, which waits for ranks that may be busy
        saved = "is lost" if isinstance(failure, ModelLostError) else "is saved before the run ends"
        run.logger.note(f"the weights of step {step} were not published; the step {saved}")
    elif _periodic_validation_due(run) or (loop.val_at_end and step == loop.max_num_steps):
        try:
            metrics |= _validated(run)
        except SamplingError as error:
            failure = error
    try:
        run.dumps.finish(step)  # a step that is reported has its rollouts on disk
    except RunError as error:
        failure = failure or error
    run.logger.log_step(step, metrics, report.timing, report.throughput)
    if failure is None:
        run.callbacks.notify("on_step", step, metrics)
    _remark(run, step, report)
    if run.config.logger.log_completions and failure is None:
        run.logger.show_completions(step, run.dumps.read_rows(step))
    failure = failure or _ranking_problem(run, metrics)
    if failure is not None:
        if not isinstance(failure, ModelLostError):
            _save_finished_steps(run, metrics, Snapshot.of(run))
        raise failure
    begins_a_replay = run.config.logger.is_replay_start(step) and step < loop.max_num_steps
    due = step % run.config.checkpointing.save_period == 0 or begins_a_replay or report.saves
    if run.config.has_checkpoints and (due or run.callbacks.wants_checkpoint):
        _save(run, metrics, Snapshot.of(run))
    return metrics


def _remark(run: SamplingRun, step: int, report: StepReport) -> None:
    """Note replaced processes, a step without tokens in the loss, failed rollouts and, once, unscored responses."""
    for text in (*run.rollouts.remarks, *report.remarks):
        run.logger.note(f"step {step}: {text}")
    run.rollouts.remarks.clear()
    if not report.metrics["valid_tokens"]:
        run.logger.note(f"step {step}: no response is in the loss, so nothing is learnt from it")
    failed = [outcome for outcome in report.sampled if outcome.failure is not None]
    if failed:
        run.logger.note(
            f"step {step}: {len(failed)} of {len(report.sampled)} rollouts failed: {describe_failures(failed)}"
        )
    errors = sum(outcome.reward_errors for outcome in report.sampled)
    if errors:
        run.logger.note_once(
            "reward errors",
            f"reward functions failed {errors} times in step {step}, and their rewards count as None "
            "(env.NAME.on_reward_error=none): logs/environment_*.log name function, exception and line; reward_errors "
            "counts them",
        )
    unscored = [outcome for outcome in report.sampled if outcome.is_unscored]
    if unscored:
        run.logger.note_once(
            "unscored",
            f"no reward function gave a reward for {len(unscored)} of {len(report.sampled)} responses (row "
            f"{unscored[0].prompt_idx} of data.train_path for one): they are left out of baselines and loss; "
            "unscored_rate counts them",
        )


def _ranking_problem(run: SamplingRun, metrics: Mapping[str, float]) -> RunError | None:
    """The error for a checkpointing.metric_name that steps do not have; None: checkpoints can be ranked."""
    config, step = run.config, run.state["total_steps"]
    name, ranked = (
        config.ranked_checkpointing.metric_name,
        config.has_checkpoints and config.ranked_checkpointing.keep_top_k is not None,
    )
    if not ranked or name is None or name in metrics or name.startswith(VALIDATION_PREFIX):
        return None
    if name.startswith(ENVIRONMENT_FIGURE):
        figures = ", ".join(sorted(one for one in metrics if one.startswith(ENVIRONMENT_FIGURE))) or "none"
        text = (
            f"checkpointing.metric_name={name} ranks checkpoints, and step {step} has no such figure; it has {figures}"
        )
        if step == 1:
            return RunError(text)
        run.logger.note_once("ranking", f"{text}. Checkpoints of such steps rank last")
        return None
    if not metrics["optimizer_steps"] or name in list_optional_metrics(config):
        return None  # a step that does not train the policy, as in the critic's warm-up, lacks many metrics
    known = ", ".join(sorted(metrics))
    return RunError(f"checkpointing.metric_name={name} ranks checkpoints, and is not a metric of a step: {known}")


def _save_finished_steps(run: SamplingRun, metrics: Mapping[str, float], snapshot: Snapshot) -> None:
    """Save before a failure ends the run; a failure to save is only noted, because the run ends with the first one."""
    step = run.state["total_steps"]
    if step == 0 or not run.config.has_checkpoints:
        return
    with _only_noted(run, f"step {step} could not be saved"):
        run.checkpointer.finish()
        if step not in run.checkpointer.list_steps():
            _save(run, metrics, snapshot, wait=True)


def _where_to_continue(run: SamplingRun) -> str:
    """Message that names the checkpoint from which a run that ends now can continue."""
    steps = run.checkpointer.list_steps()
    if not steps:
        return "there is no checkpoint: the run begins anew when it is started again"
    return f"checkpoints/step_{max(steps)} is the last one: the run goes on from there when it is started again"


def _finish_training(run: SamplingRun, metrics: Mapping[str, float]) -> None:
    """Validate and save after the last step, unless that was done; `metrics`: the metrics of the last step."""
    run.checkpointer.finish()
    step, saved = run.state["total_steps"], run.checkpointer.list_steps()
    validated: dict[str, float] = {}
    if run.config.training_loop.val_at_end and run.state.get("val_step") != step and not _asked_to_stop(run):
        try:
            validated = _validated(run)
        except SamplingError:
            _save_finished_steps(run, metrics, Snapshot.of(run))
            raise
    if not run.config.has_checkpoints:
        return
    if step not in saved:
        _save(run, {**metrics, **validated}, Snapshot.of(run), wait=True)
    elif validated:
        _save_validation(run, validated)


def _periodic_validation_due(run: SamplingRun) -> bool:
    loop, step = run.config.training_loop, run.state["total_steps"]
    return loop.val_period > 0 and step % loop.val_period == 0 and step >= loop.val_delay


def _validated(run: SamplingRun) -> dict[str, float]:
    timer = StepTimer()
    metrics = validate(run, timer)
    if metrics:
        run.state["val_step"] = run.state["total_steps"]
        run.state["val_reward"], run.state["val_accuracy"] = metrics.get("val_reward"), metrics.get("val_accuracy")
        update_early_stop(run.state["early_stop"], metrics, run.config.training_loop.early_stop)
        run.logger.log_validation(run.state["total_steps"], metrics, timer.seconds)
        run.callbacks.notify("on_validation", run.state["total_steps"], metrics)
    return metrics
