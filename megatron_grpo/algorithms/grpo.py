"""Group Relative Policy Optimization (Shao et al. 2024): sample groups of responses, score, learn, publish, repeat."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.algorithms.context import GRPORun, GRPOSaveState
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.prob_error import assess_agreement, compute_oldest_age
from megatron_grpo.algorithms.samples import dynamic_sampling, sample
from megatron_grpo.algorithms.setup import setup
from megatron_grpo.algorithms.stages import (
    add_logprobs,
    build_batch,
    learn,
    publish_and_report,
)
from megatron_grpo.algorithms.step_advantages import add_advantages, score
from megatron_grpo.algorithms.step_report import StepReport, compute_learning_metrics, compute_sampling_metrics
from megatron_grpo.algorithms.validation import validate
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.losses.advantages import scale_rewards
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.weight_sync.transport import TransferReport, WeightTransport

__all__ = [
    "GRPORun",
    "GRPOSaveState",
    "async_grpo_train",
    "dynamic_sampling",
    "grpo_step",
    "grpo_train",
    "refit_policy_generation",
    "scale_rewards",
    "setup",
    "validate",
]


def grpo_train(run: GRPORun) -> None:
    """Train until a limit, early stopping or the end of the prompts.

    The loop validates and saves on the way.
    """
    train_steps(run, grpo_step)


def async_grpo_train(run: GRPORun) -> None:
    """Train as `grpo_train` does, while samples of later steps are generated.

    Args:
        run: a run that was set up with grpo.async_grpo.enabled: it has a sample buffer, and its engines take new
            weights while they generate.

    Raises:
        ValueError: the run was set up without asynchronous sampling.
    """
    if run.buffer is None:
        raise ValueError("this run samples synchronously; set it up with grpo.async_grpo.enabled=true")
    grpo_train(run)


def refit_policy_generation(transport: WeightTransport, version: int) -> TransferReport:
    """Send the policy's weights to the engines as `version`: NeMo RL's name for `WeightTransport.publish`."""
    return transport.publish(version)


def grpo_step(run: GRPORun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do one step: sample, score, learn, publish. Returns None when no prompts are left.

    Raises:
        SamplingError: sampling or scoring failed, or training and generation disagree too much; the weights are as
            before the step.
        RunError: a value is not finite, or a process failed.
    """
    config, policy, rollouts = run.config, run.policy, run.rollouts
    number, timer = run.state["total_steps"] + 1, StepTimer()
    run.placement.wake_engines(timer)
    samples = sample(run, batches, timer)
    if samples is None:
        return None
    run.placement.offload_engines(timer)
    check = run.make_check(samples.groups, number)
    with timer.phase("batch"):
        scores = samples.scores or score(config, samples.outcomes)
        batch = build_batch(config, samples.groups, rollouts, policy.cost)
        batch.prob_error_limit = config.find_prob_error_limit(compute_oldest_age(run, samples.outcomes))
        run.dumps.hold(number, samples.groups, batch, samples.make_facts(run.loader_state))
    of_logprobs = add_logprobs(config, batch, policy, rollouts, check, timer)
    with timer.phase("advantages"):
        finite = add_advantages(config, scores, batch, rollouts)
    check.require_finite("advantages", finite | ~batch.in_loss, batch)
    run.dumps.begin()
    with timer.phase("train"):
        learned = learn(config, batch, policy, run.loss_fn, check)
    of_learning = compute_learning_metrics(learned, batch)
    assessment = assess_agreement(run, number, of_learning, samples.outcomes)
    metrics = {**compute_sampling_metrics(config, samples, scores), **of_logprobs, **of_learning}
    return publish_and_report(run, samples, metrics, learned, assessment, timer)
