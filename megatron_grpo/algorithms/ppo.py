"""Proximal Policy Optimization (Schulman et al. 2017): GRPO's step (grpo.py) with a value model."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.algorithms import stages
from megatron_grpo.algorithms.context import GRPOSaveState, PPORun
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.samples import dynamic_sampling, sample
from megatron_grpo.algorithms.setup import setup
from megatron_grpo.algorithms.step_advantages import add_advantages
from megatron_grpo.algorithms.step_report import StepReport, compute_learning_metrics, compute_sampling_metrics
from megatron_grpo.algorithms.validation import validate
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.observability.timing import StepTimer

PPOSaveState = GRPOSaveState  # the progress of a run of PPO has the same form
__all__ = ["PPORun", "PPOSaveState", "dynamic_sampling", "ppo_step", "ppo_train", "setup", "validate"]


def ppo_train(run: PPORun) -> None:
    """Train until a limit, early stopping or the end of the data."""
    train_steps(run, ppo_step)


def ppo_step(run: PPORun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do one step of PPO; errors and results are those of `grpo_step`."""
    config, policy, rollouts, timer = run.config, run.policy, run.rollouts, StepTimer()
    samples = sample(run, batches, timer)
    if samples is None:
        return None
    batch, check = stages.prepare_batch(run, samples, timer)
    logprob_metrics = stages.add_logprobs(config, batch, policy, rollouts, check, timer)
    with timer.phase("values"):
        is_finite = run.value.add_field(batch, "values")
    check.require_finite("values", is_finite | ~batch.in_loss, batch)
    with timer.phase("advantages"):
        is_finite = add_advantages(config, samples.scores, batch, rollouts, run.state)
    check.require_finite("advantages", is_finite | ~batch.in_loss, batch)
    run.dumps.begin()
    # In the first steps only the value model is trained. The policy's unchanged weights are still published, so that
    # the weight version stays the number of steps. Later the policy learns first: a refused step changes nothing.
    learned = None
    if check.step > config.steps_without_policy:
        with timer.phase("train"):
            learned = stages.train_policy(config, batch, policy, run.loss_fn, check)
    with timer.phase("train_value"):
        value_metrics = stages.train_value_model(config, batch, run.value, run.value_loss_fn, check)
    metrics = compute_sampling_metrics(config, samples)
    metrics |= logprob_metrics | compute_learning_metrics(learned, batch) | value_metrics
    return stages.publish_and_report(run, samples, metrics, learned, timer)
