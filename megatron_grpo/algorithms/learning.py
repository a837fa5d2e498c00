"""From the batch of a step to new weights: the optimizer steps of the policy and of the value model."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from megatron_grpo.config.schema import Config
from megatron_grpo.data.batch import StepBatch
from megatron_grpo.losses.interface import LossFunction, combine_metrics, is_extreme
from megatron_grpo.losses.policy_loss import ClippedPGLossFn, add_derived_metrics
from megatron_grpo.losses.value_loss import MseValueLossFn, add_explained_variance
from megatron_grpo.policy.interface import (
    NonFiniteGradientError,
    PolicyInterface,
    TrainedModel,
    TrainResult,
    ValueInterface,
)
from megatron_grpo.run.non_finite import StepGuard


def learn(
    config: Config, batch: StepBatch, policy: PolicyInterface, loss_fn: ClippedPGLossFn, guard: StepGuard
) -> TrainResult | None:
    """All optimizer steps of the policy on a batch, and the move of the reference policy if it is due.

    Returns:
        None: no token is in the loss, and the weights are as they were.

    Raises:
        RunError: a gradient is not finite; no update was made from it.
    """
    loop, size = config.loop, config.policy.train_global_batch_samples
    result = _train(config, batch, policy, loss_fn, size, guard, "the gradient")
    if loop.sync_ref_model and guard.step % loop.ref_model_sync_steps == 0:
        policy.sync_reference(loop.ref_model_mixup_alpha)
    if result is not None:
        add_derived_metrics(result.metrics)
    return result


def learn_values(
    config: Config, batch: StepBatch, value: ValueInterface, loss_fn: MseValueLossFn, guard: StepGuard
) -> dict[str, float]:
    """All optimizer steps of the value model on a batch; its metrics, none without a token in the loss.

    Raises:
        RunError: a gradient is not finite; no update was made from it.
    """
    size = config.value.train_global_batch_samples
    result = _train(config, batch, value, loss_fn, size, guard, "the value model's gradient")
    if result is None:
        return {}
    add_explained_variance(result.metrics)
    return {
        **result.metrics,
        "value_loss": result.loss,
        "value_grad_norm": result.grad_norm,
        "value_learning_rate": result.learning_rate,
    }


def _train(
    config: Config,
    batch: StepBatch,
    model: TrainedModel,
    loss_fn: LossFunction,
    minibatch: int | None,
    guard: StepGuard,
    what: str,
) -> TrainResult | None:
    """`train_in_minibatches`; a gradient that is not finite, which messages call `what`, ends the run."""
    iterations = config.passes_per_step
    try:
        return train_in_minibatches(model, batch, loss_fn, samples=minibatch or len(batch), iterations=iterations)
    except NonFiniteGradientError as error:
        guard.stop(what, error.sequences)


def train_in_minibatches(
    model: TrainedModel, batch: StepBatch, loss_fn: LossFunction, *, samples: int, iterations: int
) -> TrainResult | None:
    """`iterations` passes over the batch, one optimizer step on every `samples` sequences, in their order.

    Neighbours stay together, so the samples of a prompt share an optimizer step where `samples` allows it. Sequences
    without a token in the loss get no optimizer step: it would move the weights by momentum and decay alone.

    Returns:
        What `combine_results` makes of the optimizer steps; None: there was none.

    Raises:
        NonFiniteGradientError: a gradient is not finite; names sequences by their numbers in `batch`.
    """
    results: list[TrainResult] = []
    tokens: list[float] = []
    for _ in range(iterations):
        for sequences in batch.minibatches(samples):
            in_loss = float(batch.response_tokens[sequences][batch.in_loss[sequences]].sum())
            if in_loss:
                results.append(model.train(batch, sequences, loss_fn))
                tokens.append(in_loss)
    return combine_results(results, tokens) if results else None


def combine_results(results: Sequence[TrainResult], tokens: Sequence[float]) -> TrainResult:
    """One result for all optimizer steps of a step.

    Metrics are means over the tokens that each optimizer step took its loss over, or extremes for names ending in _max
    and _min; the loss and the gradient norm are means over optimizer steps; the learning rate is the last one.
    """
    if len(results) == 1:
        return results[0]
    shares = [
        {name: value if is_extreme(name) else value * count / sum(tokens) for name, value in result.metrics.items()}
        for result, count in zip(results, tokens, strict=True)
    ]
    return TrainResult(
        loss=fmean(result.loss for result in results),
        grad_norm=fmean(result.grad_norm for result in results),
        learning_rate=results[-1].learning_rate,
        metrics=combine_metrics(shares),
        optimizer_steps=len(results),
    )
