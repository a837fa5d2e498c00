"""The loop around the steps of an algorithm: limits, validation, reports, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from megatron_grpo.algorithms import saves
from megatron_grpo.algorithms.context import SamplingRun
from megatron_grpo.algorithms.step_report import StepReport, UnpublishedStepError, log_step
from megatron_grpo.algorithms.validation import find_stop_reason, update_early_stop, validate
from megatron_grpo.cluster.phases import phase
from megatron_grpo.config.errors import ModelLostError, RunError, SamplingError
from megatron_grpo.data.loader import iterate_batches
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.data.scores import TrainerState
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.run.directory import OUT_OF_TIME_FILE, STOP_FILE
from megatron_grpo.run.job_time import JobTime

SomeRun = TypeVar("SomeRun", bound=SamplingRun)
# One step of an algorithm on the next prompts; None: the prompts are used up.
StepFunction = Callable[[SomeRun, Iterator[list[DatumSpec]]], StepReport | None]


def train_steps(run: SomeRun, step: StepFunction[SomeRun]) -> None:
    """Train until a limit, early stopping or the end of the data.

    Raises:
        SamplingError: sampling or scoring failed, or training and generation disagree too much; the finished steps were
            saved first.
        RefitError: the weights of a step could not be published; that step was saved first.
        ModelLostError: a rank of a model is gone, and all training since the last checkpoint is lost.
        RunError: a step failed, or a file of the run cannot be written; the message says which.
    """
    limits, state, job_time = run.config.loop, run.state, JobTime.from_environment()
    with saves.complete_files(run):
        _share_progress(run)
        run.callbacks.notify("on_start", state["total_steps"], run.run_dir)
        _catch_up_on_validation(run)
        batches = iterate_batches(run.loader, limits.max_num_epochs)
        metrics: dict[str, float] = {}  # of the last step
        while state["total_steps"] < limits.max_num_steps and not _should_stop_early(run, job_time):
            began = time.monotonic()
            _share_progress(run)
            number = state["total_steps"] + 1
            try:
                with saves.save_before_failure(run, metrics), _profile(run, number), phase(f"step {number}"):
                    if run.resizer is not None:
                        run.resizer.resize(state["total_steps"])
                    report = step(run, batches)
            except UnpublishedStepError as error:
                # The models have learnt from the step: it counts although the run ends.
                _count_step(run, error.report)
                # Noted first, because saving waits for ranks that may be busy.
                result = "is lost" if isinstance(error.failure, ModelLostError) else "is saved before the run ends"
                run.logger.note(f"the weights of step {state['total_steps']} were not published; the step {result}")
                saves.end_after_step(run, error.report, error.failure)
            if report is None:
                run.logger.end_early("data_used_up", run.end_of_data)
                run.logger.note(run.end_of_data)
                break
            _count_step(run, report)
            metrics = _finish_step(run, report)
            job_time.note_step(time.monotonic() - began - run.checkpointer.save_s.get(state["total_steps"], 0.0))
            run.checkpointer.advance()
        _finish_training(run, metrics)
        run.callbacks.notify("on_end", state["total_steps"])


def _count_step(run: SamplingRun, report: StepReport) -> None:
    state, epoch = run.state, run.loader_state["epoch"]
    if epoch > state["current_epoch"]:
        state["current_epoch"] = epoch
        state["current_step"] = 0
    state["total_steps"] += 1
    state["current_step"] += 1
    state["total_valid_tokens"] += int(report.metrics["valid_tokens"])
    remark = run.loader.observe(report.sampled)
    if remark is not None:
        run.logger.note(f"step {state['total_steps']}: {remark}")


def _finish_step(run: SamplingRun, report: StepReport) -> dict[str, float]:
    """Validate if due, log the step, save if due; returns its metrics."""
    step, loop, metrics = run.state["total_steps"], run.config.loop, dict(report.metrics)
    # The validation comes first: the step's line has its metrics. If it fails, the models have learnt from the step all
    # the same, so the step is logged and saved before the run ends.
    try:
        if _is_validation_due(run) or (loop.val_at_end and step == loop.max_num_steps):
            metrics |= _validate(run)
    except SamplingError as error:
        saves.end_after_step(run, report, error)
    try:
        log_step(run, report, metrics)
        saves.require_ranking_metric(run, metrics)
    except RunError:
        saves.save_finished_steps(run, metrics)
        raise
    for alarm in run.logger.alarms:
        run.callbacks.notify("on_alarm", alarm)
    run.callbacks.notify("on_step", step, metrics)
    if run.config.logger.log_completions:
        run.logger.show_completions(step, run.dumps.read_rows(step))
    is_replay_start = run.config.logger.is_replay_start(step) and step < loop.max_num_steps
    is_due = run.checkpointer.is_due(step) or is_replay_start or report.needs_checkpoint
    if run.config.has_checkpoints and (is_due or run.callbacks.wants_checkpoint):
        saves.save_checkpoint(run, metrics)
    return metrics


def _finish_training(run: SamplingRun, metrics: dict[str, float]) -> None:
    """Validate and save after the last step, unless that was done."""
    run.checkpointer.finish()
    step, saved_steps = run.state["total_steps"], run.checkpointer.list_steps()
    validation: dict[str, float] = {}
    if run.config.loop.val_at_end and run.state.get("val_step") != step and not _is_hurried(run):
        try:
            validation = _validate(run)
        except SamplingError:
            saves.save_finished_steps(run, metrics)
            raise
    if not run.config.has_checkpoints:
        return
    if step not in saved_steps:
        saves.save_checkpoint(run, {**metrics, **validation}, wait=True)
    elif validation:
        saves.save_validation(run, validation)
    run.checkpointer.uploads.finish()


def _catch_up_on_validation(run: SamplingRun) -> None:
    # A step whose validation failed was saved, so a resumed run owes that validation.
    step = run.state["total_steps"]
    is_due = run.config.loop.val_at_start if step == 0 else _is_validation_due(run)
    if not is_due or run.state.get("val_step") == step:
        return
    validation = _validate(run)
    if validation and step in run.checkpointer.list_steps():
        saves.save_validation(run, validation)


def _is_validation_due(run: SamplingRun) -> bool:
    loop, step = run.config.loop, run.state["total_steps"]
    return loop.val_period > 0 and step % loop.val_period == 0 and step >= loop.val_delay


def _validate(run: SamplingRun) -> dict[str, float]:
    """Validate, and record the result in the run's state and files."""
    timer, step = StepTimer(), run.state["total_steps"]
    metrics = validate(run, timer)
    if metrics:
        run.state["val_step"] = step
        run.state["val_reward"], run.state["val_accuracy"] = metrics.get("val_reward"), metrics.get("val_accuracy")
        update_early_stop(run.state["early_stop"], metrics, run.config.loop.early_stop)
        run.logger.log_validation(step, metrics, timer.seconds)
        run.callbacks.notify("on_validation", step, metrics)
    return metrics


def _should_stop_early(run: SamplingRun, job_time: JobTime) -> bool:
    reason = find_stop_reason(run.state["early_stop"], run.config.loop.early_stop)
    reason = run.logger.stop_reason if reason is None else reason
    if reason is None and run.callbacks.wants_stop:
        reason = "a callback asked for it"
    if reason is None and (run.run_dir / STOP_FILE).exists():  # made by a person, or by Slurm
        reason = f"the file {STOP_FILE} is in the run's folder"
    if reason is None:
        saves_s = [*run.checkpointer.save_s.values()]
        reason = job_time.explain_end((saves_s[-1] if saves_s else None) if run.config.has_checkpoints else 0.0)
        if reason is not None:
            (run.run_dir / OUT_OF_TIME_FILE).touch()
    if reason is not None:
        run.logger.end_early("early_stop", reason)
        run.logger.note(f"training ends after step {run.state['total_steps']}: {reason}")
    return reason is not None


def _is_hurried(run: SamplingRun) -> bool:
    """True if the run was told to end, or its job ends soon."""
    return any((run.run_dir / file).exists() for file in (STOP_FILE, OUT_OF_TIME_FILE))


def _share_progress(run: SamplingRun) -> None:
    # Rollout workers hand the progress to reward functions, which may depend on it.
    limits, state = run.config.loop, run.state
    run.rollouts.trainer_state = TrainerState(
        global_step=state["total_steps"],
        max_steps=limits.max_num_steps,
        epoch=float(state["current_epoch"]),
        num_train_epochs=limits.max_num_epochs,
    )


@contextmanager
def _profile(run: SamplingRun, step: int) -> Iterator[None]:
    """Profile the ranks in a step of logger.profile_steps, which slows it."""
    if step not in run.config.logger.profile_steps:
        yield
        return
    models = run.models.values()
    for model in models:
        model.begin_profile()
    yield
    folder = run.logger.run_dir / "profiles" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        model.end_profile(str(folder))
    run.logger.note(f"step {step}: profiles in {folder}")
