"""Group Relative Policy Optimization (Shao et al. 2024): sample groups of responses, score, learn, publish, repeat."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_grpo.algorithms.advantages import group_advantages
from megatron_grpo.algorithms.checkpointer import POLICY_FOLDER
from megatron_grpo.algorithms.reward_functions import scale_rewards
from megatron_grpo.algorithms.save_state import GRPOSaveState
from megatron_grpo.algorithms.setup import GRPORun, setup
from megatron_grpo.config.schema import Config
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.refit.interface import TransferReport, WeightTransport
from megatron_grpo.rollouts.batch import group_metrics, rewards_by_group, rollout_metrics, to_sequence_batch
from megatron_grpo.rollouts.trajectory import Trajectory

__all__ = [
    "GRPORun",
    "GRPOSaveState",
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
    trajectories: list[Trajectory]


def run(config: Config) -> None:
    """One GRPO run from start (or resume) to end; ends every process it started, however it ends."""
    with setup(config) as grpo_run:
        grpo_train(grpo_run)
        grpo_run.logger.finish()


def grpo_train(run: GRPORun) -> None:
    """Train until grpo.max_num_steps or grpo.max_num_epochs is reached, validating and saving on the way."""
    limits, state = run.config.grpo, run.state
    if limits.val_at_start and state["total_steps"] == 0:
        _validated(run)
    while state["total_steps"] < limits.max_num_steps and run.loader.epoch < limits.max_num_epochs:
        for prompts in run.loader:
            report = grpo_step(run, prompts)
            _advance(state, prompts, report)
            _finish_step(run, report)
            if state["total_steps"] >= limits.max_num_steps:
                break
        else:
            state["current_epoch"] += 1
            state["current_step"] = 0
    _finish_training(run)


def grpo_step(run: GRPORun, prompts: Sequence[DatumSpec]) -> StepReport:
    """One on-policy step: sample, score, learn, publish."""
    timer = StepTimer()
    step = run.state["total_steps"] + 1
    trajectories = run.collector.collect(
        prompts,
        samples_per_prompt=run.config.grpo.num_generations_per_prompt,
        settings=run.sampling,
        run_seed=run.config.grpo.seed,
        step=step,
        timer=timer,
    )
    with timer.phase("advantages"):
        rewards = scale_rewards(
            rewards_by_group(trajectories, run.config.grpo.num_generations_per_prompt), run.config.grpo.reward_scaling
        )
        batch = learning_batch(run.config, trajectories, rewards)
    if run.uses_reference:
        with timer.phase("logprobs"):
            batch.tokens["reference_logprobs"] = run.policy.get_reference_logprobs(batch)
    with timer.phase("train"):
        learned = run.policy.train(batch, run.loss_fn)
    with timer.phase("refit"):
        transfer = refit_policy_generation(run.transport, step)
    metrics = {
        **rollout_metrics(trajectories),
        **group_metrics(rewards),
        "loss": learned.loss,
        "grad_norm": learned.grad_norm,
        "learning_rate": learned.learning_rate,
        **learned.metrics,
        "valid_tokens": float(batch.tokens["loss_mask"].sum()),
        "refit_bytes": float(transfer.bytes_sent),
    }
    return StepReport(metrics=metrics, timing=timer.seconds, trajectories=trajectories)


def learning_batch(config: Config, trajectories: Sequence[Trajectory], rewards: Tensor) -> SequenceBatch:
    """What the policy trains on: tokens, sampling log-probabilities and group-relative advantages.

    Args:
        rewards: [groups, samples], as the advantages are to see them.
    """
    advantages = group_advantages(
        rewards, leave_one_out=config.grpo.use_leave_one_out_baseline, normalize=config.grpo.normalize_rewards
    )
    return to_sequence_batch(trajectories, advantages, overlong_filtering=config.grpo.overlong_filtering)


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
    size = run.config.grpo.val_batch_size
    for start in range(0, len(run.val_prompts), size):
        trajectories += run.collector.collect(
            run.val_prompts[start : start + size],
            samples_per_prompt=1,
            settings=replace(run.sampling, temperature=run.config.grpo.val_temperature),
            run_seed=run.config.grpo.seed,
            step=0,
            timer=timer,
        )
    run.logger.show_samples(run.val_prompts, trajectories)
    measured = rollout_metrics(trajectories)
    wanted = ("accuracy", "reward", "response_length", "truncation_rate")
    return {f"val_{name}": measured[name] for name in wanted}


def _advance(state: GRPOSaveState, prompts: Sequence[DatumSpec], report: StepReport) -> None:
    state["total_steps"] += 1
    state["current_step"] += 1
    state["consumed_samples"] += len(prompts)
    state["total_valid_tokens"] += int(report.metrics["valid_tokens"])


def _finish_step(run: GRPORun, report: StepReport) -> None:
    """Log a step, after validating and before saving if they are due."""
    step = run.state["total_steps"]
    metrics = {**report.metrics, **(_validated(run) if _validation_due(run) else {})}
    run.logger.log_step(step, metrics, report.timing)
    run.logger.dump_rollouts(step, report.trajectories)
    if run.config.checkpointing.enabled and step % run.config.checkpointing.save_period == 0:
        save_checkpoint(run, metrics)


def _finish_training(run: GRPORun) -> None:
    """Validate and save after the last step, unless that step did."""
    step = run.state["total_steps"]
    metrics: dict[str, float] = {}
    if run.config.grpo.val_at_end and not _validation_due(run):
        metrics = _validated(run)
    if run.config.checkpointing.enabled and step not in run.checkpointer.steps():
        save_checkpoint(run, metrics)


def _validation_due(run: GRPORun) -> bool:
    step, limits = run.state["total_steps"], run.config.grpo
    periodic = limits.val_period > 0 and step % limits.val_period == 0
    return periodic or (limits.val_at_end and step == limits.max_num_steps)


def _validated(run: GRPORun) -> dict[str, float]:
    metrics = validate(run)
    if metrics:
        run.state["val_reward"], run.state["val_accuracy"] = metrics["val_reward"], metrics["val_accuracy"]
        run.logger.log_validation(run.state["total_steps"], metrics)
    return metrics


def save_checkpoint(run: GRPORun, metrics: Mapping[str, float]) -> None:
    """Write everything a resumed run needs as checkpoints/step_N."""
    started = time.monotonic()
    step = run.state["total_steps"]
    state = {"save_state": run.state, "metrics": dict(metrics)}
    with run.checkpointer.writing(step, state, run.loader.state_dict()) as folder:
        run.policy.save_checkpoint(str(folder))
    assert folder.name == POLICY_FOLDER
    run.logger.note(f"saved {run.checkpointer.path(step)} in {time.monotonic() - started:.1f} s")
