"""Sampling and scoring without training (debug.train=false): the first half of a step, of any algorithm."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.algorithms.context import SamplingRun
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.samples import sample
from megatron_grpo.algorithms.step_report import StepReport, compute_learning_metrics, compute_sampling_metrics
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.observability.timing import StepTimer, compute_rates


def sample_steps(run: SamplingRun) -> None:
    """Sample and score until a limit is reached."""
    train_steps(run, sampling_step)


def sampling_step(run: SamplingRun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do one step: sample, score, write; None: no prompts are left."""
    config, timer = run.config, StepTimer()
    samples = sample(run, batches, timer)
    if samples is None:
        return None
    run.dumps.hold(run.state["total_steps"] + 1, samples.groups, None, samples.make_facts(run.loader_state))
    run.dumps.begin()
    outcomes = samples.outcomes
    metrics = compute_sampling_metrics(config, samples)
    # The metric valid_tokens counts the tokens that would be in the loss.
    metrics |= compute_learning_metrics(None, StepBatch.from_outcomes(config, outcomes))
    timing = timer.seconds
    speed = compute_rates([outcome.tokens for outcome in outcomes], timing)
    return StepReport(metrics, timing, {**speed, **samples.engines}, samples.sampled)
