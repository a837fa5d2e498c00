"""From the sampled responses of a step to new weights: what is trained on, log-probabilities, optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_grpo.algorithms.consistency import effective_sample_size, mask_inconsistent_sequences
from megatron_grpo.algorithms.non_finite import require_finite_tokens, stop_step
from megatron_grpo.config.schema import Config
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.policy.interface import LossFunction, NonFiniteGradientError, TrainResult
from megatron_grpo.rollouts.batch import to_sequence_batch
from megatron_grpo.rollouts.trajectory import Trajectory

if TYPE_CHECKING:
    from megatron_grpo.algorithms.setup import GRPORun

SQUARED_WEIGHT = "sampling_importance_ratio_squared"
"""Metric of the loss from which, with sampling_importance_ratio, the effective sample size follows."""


class Trainable(Protocol):
    """The policy, or the value model."""

    def train(self, batch: SequenceBatch, loss_fn: LossFunction) -> TrainResult: ...


def learning_batch(config: Config, trajectories: Sequence[Trajectory]) -> SequenceBatch:
    """The tokens that the policy trains on, with their sampling log-probabilities; advantages are still missing."""
    return to_sequence_batch(
        trajectories,
        overlong_filtering=config.loop.overlong_filtering,
        mark_positive=config.loss_fn.positive_example_nll_weight > 0,
    )


def needs_prev_logprobs(config: Config) -> bool:
    """Whether log-probabilities at the start of the step have to be computed before it.

    With a single optimizer step on the samples they are those of that step itself, without gradient.
    """
    return config.optimizer_steps_per_step > 1 or config.loop.seq_logprob_error_threshold is not None


def add_logprobs(
    run: GRPORun, batch: SequenceBatch, trajectories: Sequence[Trajectory], step: int, timer: StepTimer
) -> dict[str, float]:
    """Fill in what the step needs of prev_logprobs and reference_logprobs, and leave inconsistent responses out.

    Returns:
        Metrics about the responses that were left out.

    Raises:
        RunError: a log-probability is not finite.
    """
    config = run.config
    if needs_prev_logprobs(config):
        with timer.phase("logprobs"):
            batch.tokens["prev_logprobs"] = run.policy.get_logprobs(batch)
        require_finite_tokens(batch, "prev_logprobs", trajectories, run.logger.run_dir, step)
    if run.uses_reference:
        with timer.phase("logprobs"):
            batch.tokens["reference_logprobs"] = run.policy.get_reference_logprobs(batch)
        require_finite_tokens(batch, "reference_logprobs", trajectories, run.logger.run_dir, step)
    threshold = config.loop.seq_logprob_error_threshold
    if threshold is None:
        return {}
    prev, generation = batch.tokens["prev_logprobs"], batch.tokens["generation_logprobs"]
    mask, metrics = mask_inconsistent_sequences(batch.tokens["loss_mask"], prev, generation, batch.lengths, threshold)
    batch.tokens["loss_mask"] = mask
    return metrics


def learn(run: GRPORun, batch: SequenceBatch, trajectories: Sequence[Trajectory], step: int) -> TrainResult:
    """All optimizer steps on the samples of a step.

    Raises:
        RunError: a gradient is not finite; the weights stay those of the optimizer step before it.
    """
    size = run.config.policy.train_global_batch_samples or len(batch)
    try:
        result = train_in_minibatches(
            run.policy, batch, run.loss_fn, samples=size, iterations=run.config.passes_per_step
        )
    except NonFiniteGradientError as error:
        stop_step("the gradient", [trajectories[i] for i in error.sequences], run.logger.run_dir, step)
    squared = result.metrics.pop(SQUARED_WEIGHT)
    result.metrics["effective_sample_size"] = effective_sample_size(
        result.metrics["sampling_importance_ratio"], squared
    )
    return result


def train_in_minibatches(
    model: Trainable, batch: SequenceBatch, loss_fn: LossFunction, *, samples: int, iterations: int
) -> TrainResult:
    """`iterations` passes over the batch, one optimizer step on every `samples` sequences, in their order.

    Neighbours stay together, so the samples of a prompt share an optimizer step where `samples` allows it.

    Raises:
        NonFiniteGradientError: with indices into `batch`.
    """
    results: list[TrainResult] = []
    tokens: list[float] = []
    for start, minibatch in _minibatches(batch, samples, iterations):
        try:
            results.append(model.train(minibatch, loss_fn))
        except NonFiniteGradientError as error:
            raise NonFiniteGradientError(error.grad_norm, [start + index for index in error.sequences]) from None
        tokens.append(float(minibatch.tokens["loss_mask"].sum()))
    return combine_results(results, tokens)


def _minibatches(batch: SequenceBatch, samples: int, iterations: int) -> Iterator[tuple[int, SequenceBatch]]:
    starts = range(0, len(batch), samples)
    parts = [batch.select(list(range(start, min(start + samples, len(batch))))) for start in starts]
    for _ in range(iterations):
        yield from zip(starts, parts, strict=True)


def combine_results(results: Sequence[TrainResult], tokens: Sequence[float]) -> TrainResult:
    """One result for all optimizer steps of a step.

    Metrics are means over the tokens that each optimizer step took its loss over, or extremes for names ending in _max
    and _min; the loss and the gradient norm are means over optimizer steps; the learning rate is the last one.
    """
    if len(results) == 1:
        return results[0]
    total = sum(tokens)
    weights = [count / total for count in tokens] if total else [1 / len(results)] * len(results)
    metrics: dict[str, float] = {}
    for name in results[0].metrics:
        values = [result.metrics[name] for result in results]
        if name.endswith("_max"):
            metrics[name] = max(values)
        elif name.endswith("_min"):
            metrics[name] = min(values)
        else:
            metrics[name] = sum(weight * value for weight, value in zip(weights, values, strict=True))
    return TrainResult(
        loss=sum(result.loss for result in results) / len(results),
        grad_norm=sum(result.grad_norm for result in results) / len(results),
        learning_rate=results[-1].learning_rate,
        metrics=metrics,
    )
