"""The unhappy end of a run: a step that failed is reported, and finished steps are saved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from megatron_grpo.algorithms.context import SamplingRun
from megatron_grpo.algorithms.saves import Snapshot, note_failures, save_finished_steps
from megatron_grpo.algorithms.step_report import StepReport, UnpublishedStepError, log_step
from megatron_grpo.config.errors import DisagreementError, ModelLostError, RunError, SamplingError


@contextmanager
def complete_files(run: SamplingRun) -> Iterator[None]:
    """Complete rollouts and checkpoint if the body fails."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(_describe_continuation(run))
        raise
    except OSError as error:  # a full disk, or the run's folder is gone
        file, reason = error.filename or run.run_dir, error.strerror or error
        raise RunError(f"{file} cannot be written: {reason}; {_describe_continuation(run)}") from error
    except RunError as error:
        with note_failures(run, "the rollouts of the step that failed could not be written"):
            run.dumps.write_all()
        with note_failures(run, "the checkpoint that was being written could not be completed"):
            run.checkpointer.finish()
        if isinstance(error, ModelLostError):
            raise ModelLostError(f"{error}; {_describe_continuation(run)}") from error
        if isinstance(error, DisagreementError):
            raise DisagreementError(f"{error}; {_describe_continuation(run)}", error.metrics) from error
        raise


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


def end_unpublished(run: SamplingRun, error: UnpublishedStepError) -> NoReturn:
    """Save a learnt step, and raise the failure of its refit."""
    step, failure = run.state["total_steps"], error.failure
    # Noted first, because saving waits for ranks that may be busy.
    result = "is lost" if isinstance(failure, ModelLostError) else "is saved before the run ends"
    run.logger.note(f"the weights of step {step} were not published; the step {result}")
    end_after_step(run, error.report, failure)


def end_after_step(run: SamplingRun, report: StepReport, failure: RunError) -> NoReturn:
    """Log and save the last step, and raise the failure."""
    with note_failures(run, "the rollouts of the last step could not be written"):
        log_step(run, report, report.metrics)
    if not isinstance(failure, ModelLostError):
        save_finished_steps(run, report.metrics)
    raise failure


def _describe_continuation(run: SamplingRun) -> str:
    steps = run.checkpointer.list_steps()
    if not steps:
        return "there is no checkpoint: the run begins anew when it is started again"
    return f"checkpoints/step_{max(steps)} is the last one: the run goes on from there when it is started again"
