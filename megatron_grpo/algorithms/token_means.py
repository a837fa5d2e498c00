"""Sums over a microbatch's tokens that add up, over microbatches and ranks, to means of the whole step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_grpo.config.loss_schema import LossConfig
    from megatron_grpo.policy.interface import GlobalCounts


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values inside the mask and 0 outside, whatever stands there, infinities and NaN included."""
    return torch.where(mask, values, torch.zeros_like(values))


def token_mean(values: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """This microbatch's share of the mean over all tokens of the step (0 when the step has none)."""
    return (values * mask).sum() / max(counts.tokens, 1.0)


def response_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[sequences, length] -> [sequences, 1]: mean over each response's tokens in the mask, 0 when it has none."""
    return (values * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def loss_share(loss: Tensor, mask: Tensor, counts: GlobalCounts, config: LossConfig) -> Tensor:
    """This microbatch's part of the step's loss, with T tokens, N sequences and n_i tokens in sequence i::

        token_level_loss             sum_it loss_it / T           (DAPO, Yu et al. 2025, eq. 12)
        token_level_loss=false       sum_i (sum_t loss_it / n_i) / N    (GRPO, Shao et al. 2024, eq. 3)
        constant_normalizer_tokens   sum_it loss_it / (N * constant)    (Dr. GRPO, Liu et al. 2025, section 3.2)

    Args:
        loss: per token, [sequences, length].
        mask: tokens in the loss, bool.
        counts: of the whole step.
        config: which of the three.
    """
    if config.constant_normalizer_tokens is not None:
        return (loss * mask).sum() / (max(counts.sequences, 1.0) * config.constant_normalizer_tokens)
    if config.token_level_loss:
        return token_mean(loss, mask, counts)
    return response_mean(loss, mask).sum() / max(counts.sequences, 1.0)
