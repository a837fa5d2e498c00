"""Supervised fine-tuning: the policy learns the responses of the rows, without sampling."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.algorithms.learnt_rows import record_rows
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.step_report import StepReport
from megatron_grpo.algorithms.supervised import SupervisedRun, make_report, take_batch, train_on_rows
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.observability.timing import StepTimer

__all__ = ["SupervisedRun", "sft_step", "sft_train"]


def sft_train(run: SupervisedRun) -> None:
    """Train until a limit, early stopping or the end of the data."""
    train_steps(run, sft_step)


def sft_step(run: SupervisedRun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do one step on the next rows; None: no rows are left.

    RunError: the gradient is not finite, or a process failed; no weights were changed by it.
    """
    timer = StepTimer()
    if (step_rows := take_batch(run, batches, timer)) is None:
        return None
    rows, batch, check = step_rows
    record_rows(run, rows, batch)
    with timer.phase("train"):
        learned = train_on_rows(run, batch, check)
    return make_report(run, batch, learned, timer, {})
