"""Training of a reward model: scores of the better and the worse response of pairs (Ouyang et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from megatron_grpo.algorithms.dpo import PreferenceRun, dpo_step
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.config.loop_schema import RewardTrainingConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.losses.preference import PreferenceLoss, compute_score_loss

__all__ = ["RewardModelRun", "reward_model_train"]


class RewardModelRun(PreferenceRun):
    """A run that trains a reward model, whose ranks are in the policy's place."""

    held_out_metrics: ClassVar = ("accuracy", "margin")

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("values",)  # the score, which only the last token of a conversation has

    def compute_loss(
        self, outputs: Sequence[Tensor], tokens: Tensor, weights: Tensor, rows: Sequence[DatumSpec]
    ) -> PreferenceLoss:
        """Compute the loss of pairs of scores."""
        margins = torch.tensor([row.get("margin", 0.0) for row in rows], dtype=torch.float64)
        loop = self.config.training_loop
        assert isinstance(loop, RewardTrainingConfig)
        return compute_score_loss(outputs[0], margins, weights, loop.center_rewards_coefficient)


def reward_model_train(run: RewardModelRun) -> None:
    """Train until a limit, early stopping or the end of the data."""
    train_steps(run, dpo_step)
