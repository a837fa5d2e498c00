"""On-policy distillation (Agarwal et al. 2024): GRPO's step (grpo.py), with teachers that score the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.algorithms import stages
from megatron_grpo.algorithms.context import DistillationRun, GRPORun
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.samples import sample
from megatron_grpo.algorithms.setup import setup
from megatron_grpo.algorithms.step_advantages import add_advantages
from megatron_grpo.algorithms.step_report import StepReport, compute_learning_metrics, compute_sampling_metrics
from megatron_grpo.algorithms.token_functions import merge_teacher_outputs
from megatron_grpo.algorithms.validation import validate
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.schema import Config
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.generation.teacher_client import fetch_teacher_outputs
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.trainer.model_ranks import MegatronTeacher

T = TypeVar("T", bound=GRPORun)
# (run, batch, outcomes) -> [sequences]: True where the outputs of sampled tokens are finite.
Teach = Callable[[T, StepBatch, Sequence[Outcome]], NDArray[np.bool_]]

__all__ = ["DistillationRun", "distillation_step", "distillation_train", "setup", "validate"]


def distillation_train(run: DistillationRun) -> None:
    """Train until a limit, early stopping or the end of the data."""
    train_steps(run, distillation_step)


def distillation_step(run: DistillationRun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do one step of distillation; errors and results are those of `grpo_step`."""
    return follow_teacher(run, batches, add_teacher_outputs)


def follow_teacher(run: T, batches: Iterator[list[DatumSpec]], teach: Teach[T]) -> StepReport | None:
    """Do one step; `teach` adds the teacher's outputs."""
    config, policy, rollouts, timer = run.config, run.policy, run.rollouts, StepTimer()
    samples = sample(run, batches, timer)
    if samples is None:
        return None
    batch, check = stages.prepare_batch(run, samples, timer)
    logprob_metrics = stages.add_logprobs(config, batch, policy, rollouts, check, timer)
    with timer.phase("teacher"):
        is_finite = teach(run, batch, samples.outcomes)
    check.require_finite("the teacher's output", is_finite | ~batch.in_loss, batch)
    if config.uses_rewards:
        with timer.phase("advantages"):
            is_finite = add_advantages(config, samples.scores, batch, rollouts, run.state)
        check.require_finite("advantages", is_finite | ~batch.in_loss, batch)
    run.dumps.begin()
    with timer.phase("train"):
        learned = stages.train_policy(config, batch, policy, run.loss_fn, check)
    metrics = compute_sampling_metrics(config, samples)
    metrics |= logprob_metrics | compute_learning_metrics(learned, batch)
    return stages.publish_and_report(run, samples, metrics, learned, timer)


def find_teacher(config: Config, task: str) -> str:
    """Find the section of a task's teacher."""
    return f"teachers.{task}" if task in config.teachers else "teacher"


def add_teacher_outputs(run: DistillationRun, batch: StepBatch, outcomes: Sequence[Outcome]) -> NDArray[np.bool_]:
    """Add the output of each sequence's teacher to the batch.

    Returns [sequences]: True where the outputs of sampled tokens are finite.
    """
    config = run.config
    names = list(config.named_teachers)
    numbers = np.array([names.index(find_teacher(config, outcome.task_name)) for outcome in outcomes], dtype=np.int64)
    is_finite = np.ones(len(batch), dtype=np.bool_)
    parts: list[str] = []
    for number, name in enumerate(names):
        sequences = np.flatnonzero(numbers == number)
        if not len(sequences):
            continue
        handle = run.teachers[name]
        if isinstance(handle, MegatronTeacher):
            flags = handle.add_outputs(batch, sequences)
        else:
            fields, vocab = ("token_ids", "sampled"), run.policy.shape.vocab
            flags = run.rollouts.compute(fetch_teacher_outputs, batch, fields, sequences, handle, vocab)
        is_finite[sequences] = flags[sequences]
        parts.append(f"teacher_outputs_{number}")
        batch.fields[parts[-1]] = batch.fields.pop("teacher_outputs")
    if len(parts) > 1:
        run.rollouts.compute(merge_teacher_outputs, batch, parts)
    else:
        batch.fields["teacher_outputs"] = batch.fields[parts[0]]
    for part in parts:
        del batch.fields[part]
    batch.teachers = numbers if len(names) > 1 else None
    return is_finite
