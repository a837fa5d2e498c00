"""Group Relative Policy Optimization (Shao et al. 2024): sample groups of responses, score, learn, publish, repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_grpo.algorithms.checkpointer import POLICY_FOLDER
from megatron_grpo.algorithms.dynamic_sampling import dynamic_sampling
from megatron_grpo.algorithms.early_stop import observe, reason_to_stop
from megatron_grpo.algorithms.learning import add_logprobs, learn, learning_batch
from megatron_grpo.algorithms.reward_functions import scale_rewards
from megatron_grpo.algorithms.sampling import StepSamples, prompt_batches, sample_step
from megatron_grpo.algorithms.save_state import GRPOSaveState
from megatron_grpo.algorithms.setup import GRPORun, setup
from megatron_grpo.algorithms.step_advantages import learning_rewards, token_advantages
from megatron_grpo.config.schema import Config
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.observability.throughput import peak_tflops, throughput
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.policy.interface import TrainResult
from megatron_grpo.refit.interface import TransferReport, WeightTransport
from megatron_grpo.rollouts.batch import group_metrics, rollout_metrics
from megatron_grpo.rollouts.metrics import length_metrics, outcome_metrics, reward_function_metrics
from megatron_grpo.rollouts.trajectory import Trajectory

__all__ = [
    "GRPORun",
    "GRPOSaveState",
    "dynamic_sampling",
    "grpo_step",
    "grpo_train",
    "refit_policy_generation",
    "run",
    "scale_rewards",
    "setup",
    "validate",
]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did."""

    metrics: dict[str, float]
    timing: dict[str, float]
    throughput: dict[str, float]
    trajectories: list[Trajectory]
    """Those that were trained on."""


Step = Callable[[Iterator[list[DatumSpec]]], StepReport | None]
"""One step of an algorithm on the next prompts; None: there are none left."""


def run(config: Config) -> None:
    """One GRPO run from start (or resume) to end; ends every process it started, however it ends."""
    with setup(config) as grpo_run:
        grpo_train(grpo_run)
        grpo_run.logger.finish()


def grpo_train(run: GRPORun) -> None:
    """Train until a limit is reached or early stopping ends it, validating and saving on the way."""
    train_steps(run, lambda batches: grpo_step(run, batches))


def train_steps(run: GRPORun, step: Step) -> None:
    """The loop around the steps of an algorithm: limits, validation, reports, checkpoints."""
    limits, state = run.config.loop, run.state
    if limits.val_at_start and state["total_steps"] == 0:
        _validated(run)
    batches = prompt_batches(run.loader, limits.max_num_epochs)
    while state["total_steps"] < limits.max_num_steps and not _stopped_early(run):
        report = step(batches)
        if report is None:
            run.logger.note(f"the data is used up: {limits.max_num_epochs} epoch(s)")
            break
        _advance(run, report)
        _finish_step(run, report)
    _finish_training(run)


def grpo_step(run: GRPORun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """One step: sample, score, learn, publish. None: no prompts are left."""
    timer = StepTimer()
    step = run.state["total_steps"] + 1
    samples = sample_step(run, batches, timer)
    if samples is None:
        return None
    trajectories = samples.trajectories
    batch = learning_batch(run.config, trajectories)
    masked = add_logprobs(run, batch, trajectories, step, timer)
    with timer.phase("advantages"):
        rewards = learning_rewards(run.config, trajectories)
        batch.tokens["advantages"] = token_advantages(run.config, trajectories, rewards, batch)
    with timer.phase("train"):
        learned = learn(run, batch, trajectories, step)
        sync_reference(run, step)
    with timer.phase("refit"):
        transfer = refit_policy_generation(run.transport, step)
    metrics = {
        **sampling_metrics(run.config, samples, rewards),
        **masked,
        **learning_metrics(run.config, learned, batch),
        "refit_bytes": float(transfer.bytes_sent),
    }
    timing = timer.seconds
    return StepReport(metrics, timing, step_throughput(run, batch, timing, run.config.passes_per_step), trajectories)


def sync_reference(run: GRPORun, step: int) -> None:
    """Move the reference policy towards the policy when it is due (TR-DPO)."""
    loop = run.config.loop
    if loop.sync_ref_model and step % loop.ref_model_sync_steps == 0:
        run.policy.sync_reference(loop.ref_model_mixup_alpha)


def sampling_metrics(config: Config, samples: StepSamples, rewards: Tensor) -> dict[str, float]:
    """About everything that was sampled, except group_metrics and filtered_reward: of what is trained on."""
    metrics = {
        **rollout_metrics(samples.sampled),
        **length_metrics(samples.sampled),
        **outcome_metrics(samples.sampled, config.loop.num_generations_per_prompt),
        **reward_function_metrics(samples.sampled),
        **group_metrics(rewards),
        **samples.metrics,
    }
    if config.loop.use_dynamic_sampling:
        metrics["filtered_reward"] = rollout_metrics(samples.trajectories)["reward"]
    return metrics


def learning_metrics(config: Config, learned: TrainResult | None, batch: SequenceBatch) -> dict[str, float]:
    """About the policy's optimizer steps; None: there were none."""
    valid_tokens = float(batch.tokens["loss_mask"].sum())
    if learned is None:
        return {"optimizer_steps": 0.0, "valid_tokens": valid_tokens}
    return {
        "loss": learned.loss,
        "grad_norm": learned.grad_norm,
        "learning_rate": learned.learning_rate,
        **learned.metrics,
        "optimizer_steps": float(config.optimizer_steps_per_step),
        "valid_tokens": valid_tokens,
    }


def step_throughput(run: GRPORun, batch: SequenceBatch, timing: Mapping[str, float], passes: int) -> dict[str, float]:
    """Figures of a step whose policy went `passes` times over the samples."""
    policy, configured = run.config.policy, run.config.cluster.peak_tflops_per_device
    return throughput(
        run.policy.settings.shape,
        batch.lengths,
        timing,
        passes=passes,
        devices=policy.parallel.world_size,
        peak=peak_tflops(run.policy.device_name, policy.precision, configured),
    )


def refit_policy_generation(transport: WeightTransport, version: int) -> TransferReport:
    """Make generation sample from the policy's current weights, as `version`.

    Raises:
        RefitError: some worker did not get or verify them; generation refuses to sample until a refit succeeds.
    """
    return transport.publish(version)


def validate(run: GRPORun) -> dict[str, float]:
    """Accuracy, reward and length on the validation prompts, one response each.

    Returns:
        Metrics whose names start with val_; empty without validation data.
    """
    if not run.val_prompts:
        return {}
    timer = StepTimer()
    trajectories: list[Trajectory] = []
    size = run.config.loop.val_batch_size
    for start in range(0, len(run.val_prompts), size):
        trajectories += run.collector.collect(
            run.val_prompts[start : start + size],
            samples_per_prompt=1,
            settings=replace(run.sampling, temperature=run.config.loop.val_temperature),
            run_seed=run.config.loop.seed,
            step=0,
            timer=timer,
        )
    run.logger.show_samples(run.val_prompts, trajectories)
    measured = rollout_metrics(trajectories)
    wanted = ("accuracy", "reward", "response_length", "truncation_rate")
    return {f"val_{name}": measured[name] for name in wanted}


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


def _finish_step(run: GRPORun, report: StepReport) -> None:
    """Log a step, after validating and before saving if they are due."""
    step = run.state["total_steps"]
    metrics = {**report.metrics, **(_validated(run) if _validation_due(run) else {})}
    run.logger.log_step(step, metrics, report.timing, report.throughput)
    run.logger.dump_rollouts(step, report.trajectories)
    if run.config.checkpointing.enabled and step % run.config.checkpointing.save_period == 0:
        save_checkpoint(run, metrics)


def _finish_training(run: GRPORun) -> None:
    """Validate and save after the last step, unless that step did."""
    step = run.state["total_steps"]
    metrics: dict[str, float] = {}
    if run.config.loop.val_at_end and not _validation_due(run):
        metrics = _validated(run)
    if run.config.checkpointing.enabled and step not in run.checkpointer.steps():
        save_checkpoint(run, metrics)


def _validation_due(run: GRPORun) -> bool:
    step, limits = run.state["total_steps"], run.config.loop
    periodic = limits.val_period > 0 and step % limits.val_period == 0
    return periodic or (limits.val_at_end and step == limits.max_num_steps)


def _validated(run: GRPORun) -> dict[str, float]:
    metrics = validate(run)
    if metrics:
        run.state["val_reward"], run.state["val_accuracy"] = metrics["val_reward"], metrics["val_accuracy"]
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
    assert folder.name == POLICY_FOLDER
    run.logger.note(f"saved {run.checkpointer.path(step)} in {time.monotonic() - started:.1f} s")
