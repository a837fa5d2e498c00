"""The figures of a step: about what was sampled, what was learnt, what was sent, and how fast."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_grpo.algorithms.samples import StepSamples
from megatron_grpo.algorithms.scoring import Scores
from megatron_grpo.config.schema import Config
from megatron_grpo.controller.loop import StepReport
from megatron_grpo.data.step_batch import StepBatch
from megatron_grpo.data.trajectory import Outcome
from megatron_grpo.observability.timing import peak_tflops, throughput
from megatron_grpo.sampler.metrics import (
    group_metrics,
    length_metrics,
    reward_function_metrics,
    rollout_metrics,
    task_metrics,
)
from megatron_grpo.trainer.group import MegatronPolicy, TrainResult
from megatron_grpo.weights.refit.transport import RefitError, TransferReport


def sampling_metrics(config: Config, samples: StepSamples, scores: Scores) -> dict[str, float]:
    """About everything that was sampled, except groups_without_signal and filtered_reward: of what is trained on.

    groups_without_signal is the share of prompts whose samples all got the same reward (with GDPO, the same advantage);
    it is left out with one sample to a prompt.
    """
    sampled: list[Outcome] = samples.sampled
    generations = config.loop.num_generations_per_prompt
    metrics = {
        **rollout_metrics(sampled),
        **length_metrics(sampled),
        **group_metrics(sampled, generations),
        **reward_function_metrics(sampled),
        **task_metrics(sampled, config.env),
        **({"groups_without_signal": float((~scores.differs).float().mean())} if generations > 1 else {}),
        "failed_rollouts": float(sum(outcome.failure is not None for outcome in sampled)),
        **samples.metrics,
    }
    if config.loop.use_dynamic_sampling:
        metrics["filtered_reward"] = rollout_metrics(samples.outcomes)["reward"]
    return metrics


def learning_metrics(learned: TrainResult | None, batch: StepBatch) -> dict[str, float]:
    """About the policy's optimizer steps; with None there were none."""
    valid_tokens = float(batch.loss_tokens)
    if learned is None:
        return {"optimizer_steps": 0.0, "valid_tokens": valid_tokens}
    return {
        "loss": learned.loss,
        "grad_norm": learned.grad_norm,
        "learning_rate": learned.learning_rate,
        **learned.metrics,
        "optimizer_steps": float(learned.optimizer_steps),
        "valid_tokens": valid_tokens,
    }


def report(
    config: Config,
    samples: StepSamples,
    metrics: Mapping[str, float],
    learned: TrainResult | None,
    transfer: TransferReport | RefitError | None,
    *,
    policy: MegatronPolicy,
    timing: Mapping[str, float],
) -> StepReport:
    """What the step did, for the loop around it.

    Args:
        config: layout and passes, which throughput is computed from.
        samples: what was sampled and trained on.
        metrics: metrics of sampling and learning.
        learned: the policy's optimizer steps; None: there were none.
        transfer: the refit that ended the step, or why it failed; None: there are no engines.
        policy: the model whose sizes and device throughput is computed from.
        timing: seconds of the step by phase, and all of them as "total".
    """
    passes = 0.0
    if learned is not None:  # minibatches without a token in the loss had no optimizer step
        passes = config.passes_per_step * learned.optimizer_steps / config.optimizer_steps_per_step
    peak = peak_tflops(policy.device_name, config.policy.precision, config.cluster.peak_tflops_per_device)
    speed = throughput(
        policy.shape,
        [outcome.tokens for outcome in samples.outcomes],
        timing,
        passes=passes,
        devices=config.policy.parallel.world_size,
        peak=peak,
    )
    failure = transfer if isinstance(transfer, RefitError) else None
    sent: dict[str, float] = {}
    remarks: tuple[str, ...] = ()
    if isinstance(transfer, TransferReport):
        sent = {
            "refit_bytes": float(transfer.bytes_sent),
            "refit_retries": float(transfer.retries),
            "engine_restarts": float(len(transfer.replaced)),
        }
        remarks = transfer.replaced
    return StepReport(
        {**metrics, **sent}, dict(timing), {**speed, **samples.engines}, samples.sampled, remarks, failure
    )
