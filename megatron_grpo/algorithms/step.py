"""What every algorithm's step begins and ends with: samples and log-probabilities; new weights and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_grpo.algorithms.sampling import StepSamples, sample_step
from megatron_grpo.algorithms.step_advantages import learning_rewards, signal_metrics
from megatron_grpo.config.schema import Config
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.losses.consistency import mask_inconsistent_sequences
from megatron_grpo.observability.throughput import peak_tflops, throughput
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.policy.interface import TrainResult
from megatron_grpo.refit.interface import RefitError, TransferReport, WeightTransport
from megatron_grpo.rollouts.batch import sampled_mask, to_sequence_batch
from megatron_grpo.rollouts.metrics import group_metrics, length_metrics, reward_function_metrics, rollout_metrics
from megatron_grpo.run.context import GRPORun
from megatron_grpo.run.non_finite import require_finite_tokens
from megatron_grpo.run.report import StepReport


@dataclass(kw_only=True)
class Step:
    """A step that has its samples and is about to learn from them."""

    number: int
    """From 1; also the version of the weights that it ends with."""
    timer: StepTimer
    samples: StepSamples
    batch: SequenceBatch
    """The trajectories laid end to end, with their log-probabilities."""
    rewards: Tensor
    """[groups, samples], of `learning_rewards`."""
    masked: dict[str, float]
    """Metrics about responses that were left out."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """What is trained on, a sequence of the batch each; samples of a prompt are neighbours."""
        return self.samples.trajectories


def begin_step(run: GRPORun, batches: Iterator[list[DatumSpec]]) -> Step | None:
    """Sample, score and compute what log-probabilities the step needs; None: no prompts are left.

    Raises:
        RunError: a reward or a log-probability is not finite, or dynamic sampling did not fill the step.
    """
    timer = StepTimer()
    samples = sample_step(run, batches, timer)
    if samples is None:
        return None
    batch = to_sequence_batch(
        samples.trajectories,
        overlong_filtering=run.config.loop.overlong_filtering,
        mark_positive=run.config.loss_fn.positive_example_nll_weight > 0,
    )
    step = Step(
        number=run.state["total_steps"] + 1,
        timer=timer,
        samples=samples,
        batch=batch,
        rewards=learning_rewards(run.config, samples.trajectories),
        masked={},
    )
    _add_logprobs(run, step)
    return step


def _add_logprobs(run: GRPORun, step: Step) -> None:
    """Fill in what the step needs of prev_logprobs and reference_logprobs; leave inconsistent responses out."""
    config, batch = run.config, step.batch
    if config.needs_prev_logprobs:
        with step.timer.phase("logprobs"):
            batch.tokens["prev_logprobs"] = run.policy.get_logprobs(batch)
        require_finite(run, step, "prev_logprobs")
    if config.uses_reference:
        with step.timer.phase("logprobs"):
            batch.tokens["reference_logprobs"] = run.policy.get_reference_logprobs(batch)
        require_finite(run, step, "reference_logprobs")
    threshold = config.loop.seq_logprob_error_threshold
    if threshold is not None:
        prev, generation = batch.tokens["prev_logprobs"], batch.tokens["generation_logprobs"]
        mask = batch.tokens["loss_mask"]
        mask, step.masked = mask_inconsistent_sequences(mask, prev, generation, batch.lengths, threshold)
        batch.tokens["loss_mask"] = mask


def require_finite(run: GRPORun, step: Step, name: str) -> None:
    """Check an entry of the step's batch where something is computed from it: in the loss, or for a reward.

    Raises:
        RunError: see `non_finite.stop_step`.
    """
    kl_in_reward = run.config.loss_fn.use_kl_in_reward and name.endswith("logprobs")
    looked_at = sampled_mask(step.trajectories) if kl_in_reward else step.batch.tokens["loss_mask"] > 0
    require_finite_tokens(step.batch, name, looked_at, step.trajectories, run.logger.run_dir, step.number)


def finish_step(
    run: GRPORun, step: Step, learned: TrainResult | None, more: Mapping[str, float] | None = None
) -> StepReport:
    """Publish the policy's weights and report the step; `StepReport.failure` says if they could not be published.

    Args:
        learned: the policy's optimizer steps; None: there were none.
        more: further metrics.
    """
    with step.timer.phase("refit"):
        transfer = publish(run.transport, step.number)
    metrics = {
        **_sampling_metrics(run.config, step),
        **step.masked,
        **_learning_metrics(learned, step.batch),
        **(more or {}),
        **({} if isinstance(transfer, RefitError) else {"refit_bytes": float(transfer.bytes_sent)}),
    }
    timing = step.timer.seconds
    passes = 0.0
    if learned is not None:  # minibatches without a token in the loss had no optimizer step
        passes = run.config.passes_per_step * learned.optimizer_steps / run.config.optimizer_steps_per_step
    failure = transfer if isinstance(transfer, RefitError) else None
    return StepReport(metrics, timing, _throughput(run, step.batch, timing, passes), step.trajectories, failure)


def publish(transport: WeightTransport, version: int) -> TransferReport | RefitError:
    """`refit_policy_generation` at the end of a step, whose failure is an outcome of the step.

    The models have learnt from the step by then, so it counts: the loop reports and saves it before it ends the run.
    """
    try:
        return refit_policy_generation(transport, version)
    except RefitError as error:
        return error


def refit_policy_generation(transport: WeightTransport, version: int) -> TransferReport:
    """Make generation sample from the policy's current weights, as `version`.

    Raises:
        RefitError: some worker did not get or verify them; generation refuses to sample until a refit succeeds.
    """
    return transport.publish(version)


def _sampling_metrics(config: Config, step: Step) -> dict[str, float]:
    """About everything that was sampled, except signal_metrics and filtered_reward: of what is trained on."""
    sampled = step.samples.sampled
    metrics = {
        **rollout_metrics(sampled),
        **length_metrics(sampled),
        **group_metrics(sampled, config.loop.num_generations_per_prompt),
        **reward_function_metrics(sampled),
        **signal_metrics(config, step.trajectories, step.rewards),
        **step.samples.metrics,
    }
    if config.loop.use_dynamic_sampling:
        metrics["filtered_reward"] = rollout_metrics(step.trajectories)["reward"]
    return metrics


def _learning_metrics(learned: TrainResult | None, batch: SequenceBatch) -> dict[str, float]:
    valid_tokens = float(batch.tokens["loss_mask"].sum())
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


def _throughput(run: GRPORun, batch: SequenceBatch, timing: Mapping[str, float], passes: float) -> dict[str, float]:
    """Figures of a step whose policy went `passes` times over the samples."""
    policy, configured = run.config.policy, run.config.cluster.peak_tflops_per_device
    return throughput(
        run.policy.shape,
        batch.lengths,
        timing,
        passes=passes,
        devices=policy.parallel.world_size,
        peak=peak_tflops(run.policy.device_name, policy.precision, configured),
    )
