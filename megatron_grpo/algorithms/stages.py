"""The stages that steps of all algorithms share: batch, log-probabilities, learning, publishing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from megatron_grpo.algorithms.context import GRPORun
from megatron_grpo.algorithms.idle_tensors import describe_idle_tensors
from megatron_grpo.algorithms.placement import publish
from megatron_grpo.algorithms.prob_error import (
    assess_agreement,
    compute_oldest_age,
    find_prob_error_limit,
    refuse_step,
    require_agreement,
)
from megatron_grpo.algorithms.records import StepCheck
from megatron_grpo.algorithms.samples import StepSamples
from megatron_grpo.algorithms.step_report import StepReport, UnpublishedStepError
from megatron_grpo.algorithms.token_functions import count_observed, flag_inconsistent_sequences
from megatron_grpo.batch.packing import TOKEN_COST, Cost
from megatron_grpo.batch.replay_files import StepFigures, locate_figures_file, write_figures
from megatron_grpo.batch.step_batch import StepBatch, partition_sequences
from megatron_grpo.batch.trajectory import SampledGroup
from megatron_grpo.config.keys import build_values
from megatron_grpo.config.schema import Config
from megatron_grpo.losses.loss import LossFunction, combine_metrics, is_extreme
from megatron_grpo.losses.policy_loss import add_derived_metrics
from megatron_grpo.losses.value import MseValueLossFn, add_explained_variance
from megatron_grpo.observability.timing import StepTimer, compute_throughput, find_peak_tflops
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.trainer.model_ranks import (
    MegatronPolicy,
    MegatronValue,
    ModelRanks,
    NonFiniteGradientError,
    RefusedStepError,
    TrainResult,
)
from megatron_grpo.weight_sync.refit_calls import RefitError


def build_batch(
    config: Config, groups: list[SampledGroup], rollouts: RolloutPool, cost: Cost = TOKEN_COST
) -> StepBatch:
    """Lay the rollouts of a step out in partitions of equal cost."""
    batch = StepBatch.from_outcomes(config, [outcome for group in groups for outcome in group.outcomes])
    batch.partitions = partition_sequences(config, batch, cost)
    batch.fields = rollouts.build_partitions(groups, batch.partitions)
    return batch


def prepare_batch(run: GRPORun, samples: StepSamples, timer: StepTimer) -> tuple[StepBatch, StepCheck]:
    """Make a step's batch and the check of its values; models take the devices."""
    # On shared devices models and engines take turns. Each step ends with a refit, unless it ends the run.
    run.placement.offload_engines(timer, keep_weights=False)
    check = run.make_check(samples.groups, run.state["total_steps"] + 1)
    with timer.phase("batch"):
        batch = build_batch(run.config, samples.groups, run.rollouts, run.policy.cost)
        if run.config.imitates_environment:
            batch.imitated_tokens = run.rollouts.compute(count_observed, batch, ("sampled",))
        batch.prob_error_limit = find_prob_error_limit(run.config, compute_oldest_age(run, samples.outcomes))
        run.dumps.hold(check.step, samples.groups, batch, samples.make_facts(run.loader_state))
    return batch, check


def add_logprobs(
    config: Config, batch: StepBatch, policy: MegatronPolicy, rollouts: RolloutPool, check: StepCheck, timer: StepTimer
) -> dict[str, float]:
    """Add the log-probabilities that the step needs.

    prev_logprobs are those of the policy before the step, prev_entropy the entropies there, reference_logprobs those of
    the reference policy. Returns
    metrics about responses that were left out.

    RunError: a log-probability that the step uses is not finite, or too far from that of generation.
    """
    # A KL penalty in the reward uses every response, the loss only the responses in it; others need not be finite.
    needs_all = config.loss_fn.use_kl_in_reward
    # A step to be replayed has them recorded, even if it learns without them.
    is_recorded = config.logger.has_replay(check.step)
    if config.needs_prev_logprobs or is_recorded:
        with timer.phase("logprobs"):
            if is_recorded:
                policy.watch_states(batch)
            is_finite = policy.add_field(batch, "prev_logprobs")
        check.require_finite("prev_logprobs", is_finite | ~(batch.in_loss | needs_all), batch)
    needed = {"prev_entropy": config.needs_entropies, "score_sizes": config.needs_score_sizes}
    for field in (name for name, is_needed in needed.items() if is_needed):
        with timer.phase("logprobs"):
            is_finite = policy.add_field(batch, field)
        check.require_finite(field, is_finite | ~batch.in_loss, batch)
    if needs_all and config.generation.has_training_filter:  # prev_logprobs lack tokens that the filter removes
        with timer.phase("logprobs"):
            is_finite = policy.add_field(batch, "unfiltered_logprobs")
        check.require_finite("unfiltered_logprobs", is_finite, batch)
    if config.uses_reference:
        with timer.phase("logprobs"):
            is_finite = policy.add_field(batch, "reference_logprobs")
        check.require_finite("reference_logprobs", is_finite | ~(batch.in_loss | needs_all), batch)
    threshold, metrics = config.sampled_loop.seq_logprob_error_threshold, {}
    if threshold is not None:
        with timer.phase("logprobs"):
            fields, lengths = ("sampled", "prev_logprobs", "generation_logprobs"), batch.sum_by_rollout(batch.lengths)
            arguments = (flag_inconsistent_sequences, batch, fields, batch.in_loss, lengths, threshold)
            is_flagged, metrics = rollouts.compute(*arguments)
        batch.in_loss = batch.in_loss & ~batch.repeat_by_sequence(
            is_flagged
        )  # before the advantages, so that their normalisation excludes these, too
    require_agreement(config, batch, rollouts, check, timer)
    return dict(metrics)


def train_policy(
    config: Config, batch: StepBatch, policy: MegatronPolicy, loss_fn: LossFunction, check: StepCheck
) -> TrainResult | None:
    """Do all optimizer steps of the policy; update the reference if due.

    None: no token is in the loss, and the weights are as they were. Raises RunError if a gradient is not finite, or
    training and generation disagree too much; no update was made from it.
    """
    loop, is_recorded = config.sampled_loop, config.logger.has_replay(check.step)
    if not config.needs_prev_logprobs:
        batch.fields.pop("prev_logprobs", None)  # computed for a replay: the step trains as if it had none
    if is_recorded:
        policy.begin_record()
    samples = config.policy.train_global_batch_samples or len(batch)
    try:
        result = train_in_minibatches(policy, batch, loss_fn, samples=samples, iterations=config.passes_per_step)
    except NonFiniteGradientError as error:
        objective = (
            "" if config.loss_fn.objective_entry is not None else f" of loss_fn.objective={config.loss_fn.objective}"
        )
        check.stop(f"the gradient{objective}", batch.find_rollouts(error.sequences))
    except RefusedStepError as error:
        metrics = {name: value for name, value in error.metrics.items() if name != "loss"}
        add_derived_metrics(metrics)
        refuse_step(config, batch, check, metrics)
    if is_recorded:
        _write_figures(config, policy, result, check)
    if loop.sync_ref_model and check.step % loop.ref_model_sync_steps == 0:
        policy.sync_reference(loop.ref_model_mixup_alpha)
    if result is not None:
        add_derived_metrics(result.metrics)
    return result


def _write_figures(config: Config, policy: MegatronPolicy, result: TrainResult | None, check: StepCheck) -> None:
    tensors, states = policy.end_record(), policy.end_states()
    if result is not None:  # a step without an optimizer step has no figures
        figures = StepFigures(
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            tensors=tensors,
            states=states,
            config=build_values(config),
            device=policy.device_name,
        )
        write_figures(locate_figures_file(check.run_dir, check.step), figures)


def train_value_model(
    config: Config, batch: StepBatch, value: MegatronValue, loss_fn: MseValueLossFn, check: StepCheck
) -> dict[str, float]:
    """Do all optimizer steps of the value model; returns its metrics."""
    samples = config.value.train_global_batch_samples or len(batch)
    try:
        result = train_in_minibatches(value, batch, loss_fn, samples=samples, iterations=config.passes_per_step)
    except NonFiniteGradientError as error:
        check.stop("the value model's gradient", batch.find_rollouts(error.sequences))
    if result is None:
        return {}
    add_explained_variance(result.metrics)
    return {
        **result.metrics,
        "value_loss": result.loss,
        "value_grad_norm": result.grad_norm,
        "value_learning_rate": result.learning_rate,
    }


def train_in_minibatches(
    model: ModelRanks, batch: StepBatch, loss_fn: LossFunction, *, samples: int, iterations: int
) -> TrainResult | None:
    """Train passes over the batch in optimizer steps of `samples` sequences.

    None: there was no optimizer step. Raises NonFiniteGradientError with the indices, in `batch`, of suspect sequences.
    """
    results: list[TrainResult] = []
    loss_tokens: list[float] = []
    for _ in range(iterations):
        # Samples of a prompt are neighbours, so they share an optimizer step where `samples` allows it.
        for sequences in batch.split_minibatches(samples):
            tokens = float(batch.response_tokens[sequences][batch.in_loss[sequences]].sum())
            # A minibatch without a token in the loss gets no step: momentum and decay alone would move the weights.
            if tokens:
                results.append(model.train(batch, sequences, loss_fn))
                loss_tokens.append(tokens)
    return combine_results(results, loss_tokens) if results else None


def combine_results(results: Sequence[TrainResult], loss_tokens: Sequence[float]) -> TrainResult:
    """Combine the results of the optimizer steps of one step.

    The loss and the gradient norm are means over optimizer steps; the learning rate is the last one.
    """
    if len(results) == 1:
        return results[0]
    # A metric is a mean over the tokens in the loss of its optimizer step, which are therefore its weight here. Names
    # that end in _max and _min are extremes, which have no weight.
    weighted_metrics = [
        {
            name: value if is_extreme(name) else value * tokens / sum(loss_tokens)
            for name, value in result.metrics.items()
        }
        for result, tokens in zip(results, loss_tokens, strict=True)
    ]
    return TrainResult(
        loss=fmean(result.loss for result in results),
        grad_norm=fmean(result.grad_norm for result in results),
        learning_rate=results[-1].learning_rate,
        metrics=combine_metrics(weighted_metrics),
        optimizer_steps=len(results),
        gpu_memory_gib=max(result.gpu_memory_gib for result in results),
        zero_gradients=frozenset.intersection(*(result.zero_gradients for result in results)),
        probe_s=results[-1].probe_s,
    )


def publish_and_report(
    run: GRPORun, samples: StepSamples, metrics: Mapping[str, float], learned: TrainResult | None, timer: StepTimer
) -> StepReport:
    """Publish a step's weights and make its report.

    Raises UnpublishedStepError, which has the report, if the engines do not serve the weights.
    """
    config, policy, step = run.config, run.policy, run.state["total_steps"] + 1
    # Assessed first, because the refit of a step that disagrees with generation also compares weights.
    assessment = assess_agreement(run, step, metrics, samples.outcomes)
    metrics, remarks = {**metrics, **assessment.metrics}, [*assessment.remarks]
    remarks += describe_idle_tensors(run.state, step, learned)
    checks: Mapping[str, float] = {}
    failure: RefitError | None = None
    if run.transport is not None:
        try:
            transfer = publish(run.transport, run.placement, step, timer)
        except RefitError as error:
            failure = error
        else:
            metrics["refit_bytes"] = float(transfer.bytes_sent)
            metrics["refit_retries"] = float(transfer.retries)
            metrics["engine_restarts"] = float(len(transfer.replaced))
            remarks += transfer.replaced
            checks = transfer.checks
    timing, passes = timer.seconds, 0.0
    if learned is not None:  # minibatches without a token in the loss had no optimizer step
        passes = config.passes_per_step * learned.optimizer_steps / config.optimizer_steps_per_step
    throughput = compute_throughput(
        policy.shape,
        [tokens for outcome in samples.outcomes for tokens, _ in outcome.sequences],
        timing,
        passes=passes,
        devices=config.policy.parallel.world_size,
        peak=find_peak_tflops(policy.device_name, config.policy.precision, config.cluster.peak_tflops_per_device),
    )
    devices = {} if learned is None else learned.summarize_devices()
    throughput |= {**devices, **samples.engines, **checks}
    report = StepReport(metrics, timing, throughput, samples.sampled, remarks, assessment.needs_checkpoint)
    if failure is not None:
        raise UnpublishedStepError(report, failure) from failure
    return report
