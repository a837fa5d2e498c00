"""Proximal Policy Optimization (Schulman et al. 2017) with a value model: sample, score, value, learn, publish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_grpo.algorithms.dynamic_sampling import dynamic_sampling
from megatron_grpo.algorithms.grpo import (
    StepReport,
    learning_metrics,
    refit_policy_generation,
    sampling_metrics,
    step_throughput,
    sync_reference,
    train_steps,
    validate,
)
from megatron_grpo.algorithms.learning import add_logprobs, learn, learning_batch, train_in_minibatches
from megatron_grpo.algorithms.non_finite import require_finite_tokens, stop_step
from megatron_grpo.algorithms.ppo_advantages import add_advantages
from megatron_grpo.algorithms.sampling import sample_step
from megatron_grpo.algorithms.save_state import PPOSaveState
from megatron_grpo.algorithms.setup import PPORun, setup
from megatron_grpo.algorithms.step_advantages import learning_rewards
from megatron_grpo.algorithms.value_loss import add_explained_variance
from megatron_grpo.config.schema import Config
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.policy.interface import NonFiniteGradientError
from megatron_grpo.rollouts.trajectory import Trajectory

__all__ = ["PPORun", "PPOSaveState", "dynamic_sampling", "ppo_step", "ppo_train", "run", "setup", "validate"]


def run(config: Config) -> None:
    """One PPO run from start (or resume) to end; ends every process it started, however it ends."""
    with setup(config) as ppo_run:
        assert isinstance(ppo_run, PPORun)
        ppo_train(ppo_run)
        ppo_run.logger.finish()


def ppo_train(run: PPORun) -> None:
    """Train until a limit is reached or early stopping ends it, validating and saving on the way."""
    train_steps(run, lambda batches: ppo_step(run, batches))


def ppo_step(run: PPORun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """One step: sample, score, estimate advantages, train both models, publish. None: no prompts are left.

    In the first ppo.policy_training_start_step steps the policy stays as it is; its weights are published all the same,
    so that versions count steps.
    """
    timer = StepTimer()
    step, config = run.state["total_steps"] + 1, run.config
    samples = sample_step(run, batches, timer)
    if samples is None:
        return None
    trajectories = samples.trajectories
    batch = learning_batch(config, trajectories)
    masked = add_logprobs(run, batch, trajectories, step, timer)
    with timer.phase("values"):
        batch.tokens["values"] = run.value.get_values(batch)
    require_finite_tokens(batch, "values", trajectories, run.logger.run_dir, step)
    with timer.phase("advantages"):
        rewards = learning_rewards(config, trajectories)
        add_advantages(config, trajectories, rewards, batch)
    with timer.phase("train_value"):
        value_metrics = learn_values(run, batch, trajectories, step)
    learned = None
    with timer.phase("train"):
        if step > config.ppo.policy_training_start_step:
            learned = learn(run, batch, trajectories, step)
            sync_reference(run, step)
    with timer.phase("refit"):
        transfer = refit_policy_generation(run.transport, step)
    metrics = {
        **sampling_metrics(config, samples, rewards),
        **masked,
        **learning_metrics(config, learned, batch),
        **value_metrics,
        "refit_bytes": float(transfer.bytes_sent),
    }
    timing = timer.seconds
    passes = 0 if learned is None else config.passes_per_step
    return StepReport(metrics, timing, step_throughput(run, batch, timing, passes), trajectories)


def learn_values(run: PPORun, batch: SequenceBatch, trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """All optimizer steps of the value model on the samples of a step; its metrics.

    Raises:
        RunError: a gradient is not finite; the weights stay those of the optimizer step before it.
    """
    needed = {name: batch.tokens[name] for name in ("loss_mask", "values", "returns")}
    size = run.config.value.train_global_batch_samples or len(batch)
    try:
        result = train_in_minibatches(
            run.value,
            SequenceBatch(batch.lengths, batch.token_ids, needed),
            run.value_loss_fn,
            samples=size,
            iterations=run.config.passes_per_step,
        )
    except NonFiniteGradientError as error:
        bad = [trajectories[i] for i in error.sequences]
        stop_step("the value model's gradient", bad, run.logger.run_dir, step)
    add_explained_variance(result.metrics)
    return {
        **result.metrics,
        "value_loss": result.loss,
        "value_grad_norm": result.grad_norm,
        "value_learning_rate": result.learning_rate,
    }
