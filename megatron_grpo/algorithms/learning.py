"""From the samples of a step to new weights: the optimizer steps of the policy and of the value model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from megatron_grpo.algorithms.step import Step
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.losses.interface import LossFunction, combine_metrics, is_extreme
from megatron_grpo.losses.policy_loss import add_derived_metrics
from megatron_grpo.losses.value_loss import add_explained_variance
from megatron_grpo.policy.interface import NonFiniteGradientError, TrainedModel, TrainResult
from megatron_grpo.run.context import GRPORun, PPORun
from megatron_grpo.run.non_finite import stop_step


def learn(run: GRPORun, step: Step) -> TrainResult | None:
    """All optimizer steps of the policy on the samples of a step, and the move of the reference policy if it is due.

    Returns:
        None: no token is in the loss, and the weights are as they were.

    Raises:
        RunError: a gradient is not finite; no update was made from it.
    """
    loop = run.config.loop
    with step.timer.phase("train"):
        size = run.config.policy.train_global_batch_samples
        result = _train(run, step, run.policy, step.batch, run.loss_fn, size, "the gradient")
        if loop.sync_ref_model and step.number % loop.ref_model_sync_steps == 0:
            run.policy.sync_reference(loop.ref_model_mixup_alpha)
    if result is None:
        run.logger.note(f"step {step.number}: no response is in the loss, so nothing is learnt from it")
    else:
        add_derived_metrics(result.metrics)
    return result


def learn_values(run: PPORun, step: Step) -> dict[str, float]:
    """All optimizer steps of the value model on the samples of a step; its metrics, none without a token in the loss.

    Raises:
        RunError: a gradient is not finite; no update was made from it.
    """
    needed = {name: step.batch.tokens[name] for name in ("loss_mask", "values", "returns")}
    batch = SequenceBatch(step.batch.lengths, step.batch.token_ids, needed)
    with step.timer.phase("train_value"):
        size = run.config.value.train_global_batch_samples
        result = _train(run, step, run.value, batch, run.value_loss_fn, size, "the value model's gradient")
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
    run: GRPORun,
    step: Step,
    model: TrainedModel,
    batch: SequenceBatch,
    loss_fn: LossFunction,
    minibatch: int | None,
    what: str,
) -> TrainResult | None:
    """`train_in_minibatches`; a gradient that is not finite, which messages call `what`, ends the run."""
    iterations = run.config.passes_per_step
    try:
        return train_in_minibatches(model, batch, loss_fn, samples=minibatch or len(batch), iterations=iterations)
    except NonFiniteGradientError as error:
        stop_step(what, [step.trajectories[i] for i in error.sequences], run.logger.run_dir, step.number)


def train_in_minibatches(
    model: TrainedModel, batch: SequenceBatch, loss_fn: LossFunction, *, samples: int, iterations: int
) -> TrainResult | None:
    """`iterations` passes over the batch, one optimizer step on every `samples` sequences, in their order.

    Neighbours stay together, so the samples of a prompt share an optimizer step where `samples` allows it. Sequences
    without a token in the loss get no optimizer step: it would move the weights by momentum and decay alone.

    Returns:
        What `combine_results` makes of the optimizer steps; None: there was none.

    Raises:
        NonFiniteGradientError: with indices into `batch`.
    """
    results: list[TrainResult] = []
    tokens: list[float] = []
    for start, minibatch in _minibatches(batch, samples, iterations):
        in_loss = float(minibatch.tokens["loss_mask"].sum())
        if in_loss == 0:
            continue
        try:
            results.append(model.train(minibatch, loss_fn))
        except NonFiniteGradientError as error:
            raise NonFiniteGradientError(error.grad_norm, [start + index for index in error.sequences]) from None
        tokens.append(in_loss)
    return combine_results(results, tokens) if results else None


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
