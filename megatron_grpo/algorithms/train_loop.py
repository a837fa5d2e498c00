"""The loop around the steps of an algorithm: limits, validation, reports, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from megatron_grpo.algorithms.early_stop import observe, reason_to_stop
from megatron_grpo.algorithms.run import GRPORun
from megatron_grpo.algorithms.sampling import prompt_batches
from megatron_grpo.algorithms.step import StepReport
from megatron_grpo.algorithms.validation import validate
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.loop_schema import VALIDATION_PREFIX
from megatron_grpo.config.schema import Config
from megatron_grpo.data.interfaces import DatumSpec

StepFunction = Callable[[Iterator[list[DatumSpec]]], StepReport | None]
"""One step of an algorithm on the next prompts; None: there are none left."""


def train_steps(run: GRPORun, step: StepFunction) -> None:
    """Train until a limit is reached, early stopping ends it or the prompts are used up."""
    limits, state = run.config.loop, run.state
    if limits.val_at_start and state["total_steps"] == 0:
        _validated(run)
    batches = prompt_batches(run.loader, limits.max_num_epochs)
    metrics: dict[str, float] = {}
    while state["total_steps"] < limits.max_num_steps and not _stopped_early(run):
        report = step(batches)
        if report is None:
            run.logger.note(f"the data is used up: {limits.max_num_epochs} epoch(s)")
            break
        _advance(run, report)
        metrics = _finish_step(run, report)
    _finish_training(run, metrics)


def _stopped_early(run: GRPORun) -> bool:
    reason = reason_to_stop(run.state["early_stop"], run.config.loop.early_stop)
    if reason is not None:
        run.logger.note(f"training ends after step {run.state['total_steps']}: {reason}")
    return reason is not None


def _advance(run: GRPORun, report: StepReport) -> None:
    state = run.state
    if run.loader.epoch > state["current_epoch"]:
        state["current_epoch"] = run.loader.epoch
        state["current_step"] = 0
    state["total_steps"] += 1
    state["current_step"] += 1
    state["total_valid_tokens"] += int(report.metrics["valid_tokens"])


def _finish_step(run: GRPORun, report: StepReport) -> dict[str, float]:
    """Log a step, after validating and before saving if they are due; its metrics, those of the validation included."""
    step = run.state["total_steps"]
    metrics = {**report.metrics, **(_validated(run) if _validation_due(run) else {})}
    run.logger.log_step(step, metrics, report.timing, report.throughput)
    run.logger.dump_rollouts(step, report.trajectories)
    _require_ranking_metric(run.config, metrics)
    if run.config.checkpointing.enabled and step % run.config.checkpointing.save_period == 0:
        save_checkpoint(run, metrics)
    return metrics


def _require_ranking_metric(config: Config, metrics: Mapping[str, float]) -> None:
    checkpointing = config.checkpointing
    name, ranked = checkpointing.metric_name, checkpointing.enabled and checkpointing.keep_top_k is not None
    if not metrics["optimizer_steps"]:
        return  # of such a step, in the critic's warm-up for one, much is not known
    if ranked and not name.startswith(VALIDATION_PREFIX) and name not in metrics:
        known = ", ".join(sorted(metrics))
        raise RunError(f"checkpointing.metric_name={name} ranks checkpoints, and is no metric of a step: {known}")


def _finish_training(run: GRPORun, metrics: Mapping[str, float]) -> None:
    """Validate and save after the last step, whose metrics these are, unless that step did."""
    step = run.state["total_steps"]
    if run.config.loop.val_at_end and not _validation_due(run):
        metrics = {**metrics, **_validated(run)}
    if run.config.checkpointing.enabled and step not in run.checkpointer.steps():
        save_checkpoint(run, metrics)


def _validation_due(run: GRPORun) -> bool:
    step, limits = run.state["total_steps"], run.config.loop
    periodic = limits.val_period > 0 and step % limits.val_period == 0
    return periodic or (limits.val_at_end and step == limits.max_num_steps)


def _validated(run: GRPORun) -> dict[str, float]:
    metrics = validate(run)
    if metrics:
        run.state["val_reward"], run.state["val_accuracy"] = metrics.get("val_reward"), metrics.get("val_accuracy")
        observe(run.state["early_stop"], metrics, run.config.loop.early_stop)
        run.logger.log_validation(run.state["total_steps"], metrics)
    return metrics


def save_checkpoint(run: GRPORun, metrics: Mapping[str, float]) -> None:
    """Write everything a resumed run needs as checkpoints/step_N."""
    started = time.monotonic()
    step = run.state["total_steps"]
    cache = [[trajectory.to_row() for trajectory in group] for group in run.batch_cache]
    state = {"save_state": run.state, "metrics": dict(metrics), "batch_cache": cache}
    with run.checkpointer.writing(step, state, run.loader.state_dict()) as folder:
        run.save_models(folder)
    run.logger.note(f"saved {run.checkpointer.path(step)} in {time.monotonic() - started:.1f} s")
