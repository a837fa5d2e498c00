"""The report of a step: its metrics, times and remarks, and how a run logs them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_grpo.algorithms.context import SamplingRun
from megatron_grpo.algorithms.samples import StepSamples
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.schema import Config
from megatron_grpo.rollouts import rollout_metrics
from megatron_grpo.rollouts.failures import describe_failures
from megatron_grpo.rollouts.repeated_samples import REPEATED, find_copies
from megatron_grpo.trainer.model_ranks import TrainResult
from megatron_grpo.weight_sync.refit_calls import RefitError


@dataclass(frozen=True, slots=True)
class StepReport:
    """Metrics and samples of one step."""

    metrics: dict[str, float]
    timing: dict[str, float]  # seconds by phase, and of the step as "total"
    throughput: dict[str, float]
    sampled: list[Outcome]  # all sampled responses, including those that dynamic sampling dropped
    remarks: Sequence[str] = ()  # messages for the progress output
    needs_checkpoint: bool = False  # True: a checkpoint is written after the step, whatever its number


class UnpublishedStepError(Exception):
    """A step was learnt, and its weights were not published."""

    def __init__(self, report: StepReport, failure: RefitError) -> None:
        super().__init__(str(failure))
        self.report, self.failure = report, failure


def compute_sampling_metrics(config: Config, samples: StepSamples) -> dict[str, float]:
    """Compute the metrics of all sampled rollouts."""
    sampled = samples.sampled
    generations = config.sampled_loop.num_generations_per_prompt
    metrics = {
        **rollout_metrics.compute_rollout_metrics(sampled),
        **rollout_metrics.compute_length_metrics(sampled),
        **rollout_metrics.compute_group_metrics(sampled, generations),
        **rollout_metrics.compute_reward_function_metrics(sampled),
        **rollout_metrics.compute_task_metrics(sampled, config.env),
        # This one and filtered_reward cover only rollouts that are trained on; a single sample never has a signal.
        **({"groups_without_signal": float((~samples.scores.differs).float().mean())} if generations > 1 else {}),
        "failed_rollouts": float(sum(outcome.failure is not None for outcome in sampled)),
        **rollout_metrics.count_faults(sampled),
        **samples.metrics,
    }
    if config.sampled_loop.use_dynamic_sampling:
        metrics["filtered_reward"] = rollout_metrics.compute_rollout_metrics(samples.outcomes)["reward"]
    return metrics


def compute_learning_metrics(learned: TrainResult | None, batch: StepBatch) -> dict[str, float]:
    """Compute the metrics of the policy's optimizer steps, if any."""
    metrics: dict[str, float] = {}
    if learned is not None:
        metrics |= {"loss": learned.loss, "grad_norm": learned.grad_norm, "learning_rate": learned.learning_rate}
        metrics |= learned.metrics
    steps = 0 if learned is None else learned.optimizer_steps
    return {**metrics, "optimizer_steps": float(steps), "valid_tokens": float(batch.loss_tokens)}


def log_step(run: SamplingRun, report: StepReport, metrics: Mapping[str, float]) -> None:
    """Log the last step, once its rollouts are on disk."""
    step = run.state["total_steps"]
    try:
        run.dumps.finish(step)
    finally:
        run.logger.log_step(step, metrics, report.timing, report.throughput)
        _log_remarks(run, step, report)


def _log_remarks(run: SamplingRun, step: int, report: StepReport) -> None:
    for text in (*run.rollouts.remarks, *report.remarks):
        run.logger.note(f"step {step}: {text}")
    run.rollouts.remarks.clear()
    if not report.metrics["valid_tokens"]:
        run.logger.note(f"step {step}: no response is in the loss, so nothing is learnt from it")
    failed = [outcome for outcome in report.sampled if outcome.failure is not None]
    if failed:
        run.logger.note(
            f"step {step}: {len(failed)} of {len(report.sampled)} rollouts failed: {describe_failures(failed)}"
        )
    faulty = [outcome for outcome in report.sampled if outcome.fault is not None]
    if faulty:
        reasons = describe_failures(faulty, lambda outcome: outcome.fault)
        run.logger.note(
            f"step {step}: {len(faulty)} of {len(report.sampled)} responses failed by their own text: {reasons}"
        )
    errors = sum(outcome.reward_errors for outcome in report.sampled)
    if errors:
        run.logger.note_once(
            "reward errors",
            f"reward functions failed {errors} times in step {step}, and their rewards count as None "
            "(env.NAME.on_reward_error=none): logs/environment_*.log name function, exception and line; reward_errors "
            "counts them",
        )
    _note_repeated_samples(run, step, report.sampled)
    unscored = [outcome for outcome in report.sampled if outcome.is_unscored]
    if unscored and run.config.uses_rewards:
        run.logger.note_once(
            "unscored",
            f"no reward function gave a reward for {len(unscored)} of {len(report.sampled)} responses (row "
            f"{unscored[0].prompt_idx} of data.train_path for one): they are left out of baselines and loss; "
            "unscored_rate counts them",
        )


def _note_repeated_samples(run: SamplingRun, step: int, sampled: Sequence[Outcome]) -> None:
    copies = find_copies(sampled)
    if not copies:
        return
    worst = min(copies, key=lambda outcome: outcome.reward_metrics[REPEATED])
    groups = len({(outcome.group, outcome.prompt_idx) for outcome in copies})
    all_groups = len({(outcome.group, outcome.prompt_idx) for outcome in sampled})
    run.logger.note_once(
        "repeated samples",
        f"step {step}: {len(copies)} of {len(sampled)} responses, in {groups} of {all_groups} groups, have exactly the "
        f"tokens of another sample of their prompt, which independent draws would hardly have (row {worst.prompt_idx} "
        f"of data.train_path: {worst.response_tokens} tokens, probability at most 1e"
        f"{math.ceil(worst.reward_metrics[REPEATED])}): samples share a random seed, or a response is returned twice. "
        "Equal samples say nothing about which response is better. repeated_samples has their share in every step, and "
        f"{REPEATED} in rollouts/ marks them",
    )
