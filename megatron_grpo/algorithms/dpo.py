"""Direct Preference Optimization (Rafailov et al. 2023): the policy learns pairs of a better and a worse response.

A step first computes the log-probabilities of all responses under the policy and the reference. They determine the loss
and its derivative by each response, so the gradient is that of a sum over tokens: the two responses of a pair may lie
in different microbatches and on different replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.step_report import StepReport
from megatron_grpo.algorithms.supervised import SupervisedRun, make_batch, make_report, take_batch, train_on_rows
from megatron_grpo.algorithms.token_functions import sum_logprobs
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.config.loop_schema import HELD_OUT_LOSS
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.losses.preference import PreferenceLoss, compute_preference_loss
from megatron_grpo.observability.timing import StepTimer

__all__ = ["PreferenceRun", "dpo_step", "dpo_train"]


class PreferenceRun(SupervisedRun):
    """A run that learns from pairs."""

    def measure_rows(self, rows: Sequence[DatumSpec], count: int) -> dict[str, float]:
        """Sum loss and accuracy over the first `count` pairs."""
        batch, _ = make_batch(self, rows)
        self.policy.add_field(batch, "prev_logprobs")
        self.policy.add_field(batch, "reference_logprobs")
        batch.in_loss[2 * count :] = False
        result = compare_pairs(self, batch)
        accuracy = result.metrics["preference_accuracy"]
        return {HELD_OUT_LOSS: count * result.loss, "preference_accuracy": count * accuracy, "units": float(count)}


def dpo_train(run: PreferenceRun) -> None:
    """Train until a limit, early stopping or the end of the data."""
    train_steps(run, dpo_step)


def dpo_step(run: PreferenceRun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do one step on the next pairs; None: no pairs are left.

    RunError: a log-probability or the gradient is not finite, or a process failed; no weights were changed by it.
    """
    timer = StepTimer()
    if (checked_batch := take_batch(run, batches, timer)) is None:
        return None
    batch, check = checked_batch
    with timer.phase("logprobs"):
        for field in ("prev_logprobs", "reference_logprobs"):
            check.require_finite(field, run.policy.add_field(batch, field), batch)
        result = compare_pairs(run, batch)
    batch.advantages = -result.gradient.flatten().float().numpy()
    with timer.phase("train"):
        learned = train_on_rows(run, batch, check)
    if learned is not None:
        learned.loss = result.loss
    return make_report(run, batch, learned, timer, result.metrics)


def compare_pairs(run: PreferenceRun, batch: StepBatch) -> PreferenceLoss:
    """Compute the loss of a batch of pairs, which are neighbours."""
    sums = {
        field: run.rollouts.compute(sum_logprobs, batch, ("sampled", field), field)
        for field in ("prev_logprobs", "reference_logprobs")
    }
    policy, reference = (torch.from_numpy(values).view(-1, 2) for values in sums.values())
    weights = np.ones(len(batch)) if batch.loss_weights is None else batch.loss_weights
    return compute_preference_loss(
        policy,
        reference,
        torch.from_numpy(batch.response_tokens).view(-1, 2),
        torch.from_numpy(weights * batch.in_loss).view(-1, 2)[:, 0].double(),
        run.config.dpo,
    )
