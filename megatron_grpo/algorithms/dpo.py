"""Algorithms that learn pairs of a better and a worse response: Direct Preference Optimization (Rafailov et al. 2023),
and the training of a reward model, which scores them (Ouyang et al. 2022).

A step first computes the outputs of all responses: their log-probabilities under the policy and the reference, or a
reward model's scores. They determine the loss and its derivative by each response, so the gradient is that of a sum
over tokens: the two responses of a pair may lie in different microbatches and on different replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.algorithms.learnt_rows import record_rows
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.step_report import StepReport
from megatron_grpo.algorithms.supervised import SupervisedRun, make_batch, make_report, take_batch, train_on_rows
from megatron_grpo.algorithms.token_functions import sum_over_sampled
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.config.loop_schema import HELD_OUT_LOSS, DPOConfig, RewardTrainingConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.losses.preference import PreferenceLoss, compute_preference_loss, compute_score_loss
from megatron_grpo.observability.timing import StepTimer

__all__ = ["PreferenceRun", "RewardModelRun", "dpo_step", "dpo_train", "reward_model_train"]


class PreferenceRun(SupervisedRun):
    """A run that learns from pairs, or labelled responses."""

    held_out_metrics: ClassVar[tuple[str, ...]] = ("preference_accuracy",)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs of the model (`trainer.model_ranks.OUTPUTS`) that determine the loss."""
        return ("prev_logprobs", "reference_logprobs") if self.config.uses_reference else ("prev_logprobs",)

    def measure_rows(self, rows: Sequence[DatumSpec], count: int) -> dict[str, float]:
        """Sum loss and metrics over the first `count` rows."""
        batch, _ = make_batch(self, rows)
        for field in self.outputs:
            self.policy.add_field(batch, field)
        batch.in_loss[len(batch) // len(rows) * count :] = False
        result = compare_pairs(self, rows, batch)
        means = {HELD_OUT_LOSS: result.loss} | {name: result.metrics[name] for name in self.held_out_metrics}
        return {**{name: count * mean for name, mean in means.items()}, "units": float(count)}

    def compute_loss(
        self, outputs: Sequence[Tensor], tokens: Tensor, weights: Tensor, rows: Sequence[DatumSpec]
    ) -> PreferenceLoss:
        """Compute the loss of pairs.

        `outputs`, one a name in `self.outputs`, and `tokens` are [pairs, 2]: sums over each response's tokens, and
        their number. `weights`: [pairs]. Without pairs, all have one column.
        """
        policy, reference = outputs[0], outputs[-1]  # simpo has no reference, and reads none
        loop = self.config.loop
        assert isinstance(loop, DPOConfig)
        return compute_preference_loss(policy, reference, tokens, weights, loop)


def dpo_train(run: PreferenceRun) -> None:
    """Train until a limit, early stopping or the end of the data."""
    train_steps(run, dpo_step)


def dpo_step(run: PreferenceRun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """Do one step on the next pairs or rows; None: none are left.

    RunError: an output or the gradient is not finite, or a process failed; no weights were changed by it.
    """
    timer = StepTimer()
    if (step_rows := take_batch(run, batches, timer)) is None:
        return None
    rows, batch, check = step_rows
    with timer.phase("logprobs"):
        for field in run.outputs:
            check.require_finite(field, run.policy.add_field(batch, field), batch)
        result = compare_pairs(run, rows, batch)
    batch.advantages = -result.gradient.flatten().float().numpy()
    record_rows(run, rows, batch, result.rewards)
    with timer.phase("train"):
        learned = train_on_rows(run, batch, check)
    if learned is not None:
        learned.loss = result.loss
    return make_report(run, batch, learned, timer, result.metrics)


def compare_pairs(run: PreferenceRun, rows: Sequence[DatumSpec], batch: StepBatch) -> PreferenceLoss:
    """Compute the loss of rows; responses of a pair are neighbours."""
    sums = [run.rollouts.compute(sum_over_sampled, batch, ("sampled", field), field) for field in run.outputs]
    weights = np.ones(len(batch)) if batch.loss_weights is None else batch.loss_weights
    return run.compute_loss(
        [torch.from_numpy(values).view(len(rows), -1) for values in sums],
        torch.from_numpy(batch.response_tokens).view(len(rows), -1),
        torch.from_numpy(weights * batch.in_loss).view(len(rows), -1)[:, 0].double(),
        rows,
    )


class RewardModelRun(PreferenceRun):
    """A run that trains a reward model, whose ranks are in the policy's place."""

    held_out_metrics: ClassVar = ("accuracy", "margin")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The score, which only the last token of a conversation has."""
        return ("values",)

    def compute_loss(
        self, outputs: Sequence[Tensor], tokens: Tensor, weights: Tensor, rows: Sequence[DatumSpec]
    ) -> PreferenceLoss:
        """Compute the loss of pairs of scores."""
        margins = torch.tensor([row.get("margin", 0.0) for row in rows], dtype=torch.float64)
        loop = self.config.loop
        assert isinstance(loop, RewardTrainingConfig)
        return compute_score_loss(outputs[0], margins, weights, loop.center_rewards_coefficient)


def reward_model_train(run: RewardModelRun) -> None:
    """Train until a limit, early stopping or the end of the data."""
    train_steps(run, dpo_step)
