"""Sums over a microbatch's tokens that add up, over microbatches and ranks, to means of the whole step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_grpo.config.loss_schema import LossConfig
    from megatron_grpo.losses.interface import GlobalCounts
    from megatron_grpo.losses.segments import Segments


MAX_LOG_RATIO = 40.0
"""Where log ratios of probabilities are cut off: e^40 = 2e17 and its square are float32 numbers. Such a ratio is a
defect, or of a response so long that its weight means nothing; infinite, it would turn an advantage of 0 into NaN."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Log ratios [...] of any shape, floating point, limited to +- MAX_LOG_RATIO; beyond that the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of log ratios [...] of any shape, floating point, first limited to +- MAX_LOG_RATIO: always finite."""
    return bounded(log_ratio).exp()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values inside a mask and 0 outside it, whatever stands there, infinities and NaN included.

    Values [...] of any shape and dtype; mask [...], bool, in the shape of the values.
    """
    # A product with the mask would keep NaN, and its gradient too; where() cuts both.
    return torch.where(mask, values, torch.zeros_like(values))


def token_mean(values: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """[...], any dtype, and a bool mask of that shape -> []: a microbatch's share of the mean over a step's tokens."""
    return (values * mask).sum() / counts.tokens


def response_sum(values: Tensor, mask: Tensor, segments: Segments | None) -> Tensor:
    """Sum over each response's tokens in the mask, at every token of the response, without gradient.

    Args:
        values: [sequences, length], or flat [tokens], float32.
        mask: bool, in the shape of the values: tokens in the loss.
        segments: the sequences of a flat microbatch; None: the rows are the sequences.
    """
    kept = (values * mask).detach()
    return kept.sum(dim=1, keepdim=True).expand_as(values) if segments is None else segments.totals(kept)


def remaining_sum(values: Tensor, mask: Tensor, segments: Segments | None) -> Tensor:
    """Sum over a token and those of its response after it, as far as they are in the mask, without gradient.

    Args:
        values: [sequences, length], or flat [tokens], float32.
        mask: bool, in the shape of the values: tokens in the loss.
        segments: the sequences of a flat microbatch, one after the other; None: the rows are the sequences.

    Raises:
        ValueError: ranks share the sequences, and each has only some of a response's tokens.
    """
    kept = (values * mask).detach().double()  # sums over a whole microbatch are subtracted from one another
    onwards = kept.flip(-1).cumsum(-1).flip(-1)
    if segments is None:
        return onwards.to(values.dtype)
    if segments.join is not None:
        raise ValueError("what follows a token is on other ranks with context parallelism")
    sums = torch.zeros_like(segments.sizes, dtype=kept.dtype).index_add_(0, segments.of_token, kept)
    later = sums.flip(0).cumsum(0).flip(0) - sums
    return (onwards - later[segments.of_token]).to(values.dtype)


def response_mean(values: Tensor, mask: Tensor, segments: Segments | None) -> Tensor:
    """Mean over each response's tokens in the mask, at every token of the response, without gradient.

    Args:
        values: [sequences, length], or flat [tokens], float32.
        mask: bool, in the shape of the values: tokens in the loss.
        segments: the sequences of a flat microbatch; None: the rows are the sequences.
    """
    return response_sum(values, mask, segments) / response_size(mask, segments)


def response_size(mask: Tensor, segments: Segments | None) -> Tensor:
    """Tokens in the loss of each token's response, at least 1; [sequences, 1] for rows and [tokens] for segments.

    Args:
        mask: [sequences, length], or flat [tokens], bool: tokens in the loss.
        segments: the sequences of a flat microbatch; None: the rows are the sequences.
    """
    # At least 1: a response outside the loss has mean 0, not NaN, which times a mask of 0 would still be NaN.
    return mask.sum(dim=1, keepdim=True).clamp(min=1) if segments is None else segments.size_of_token


def loss_share(
    loss: Tensor, mask: Tensor, counts: GlobalCounts, config: LossConfig, segments: Segments | None
) -> Tensor:
    """A microbatch's part of the step's loss, shape []: T tokens, n_i of them in sequence i, in N of all M sequences::

        token_level_loss             sum_it loss_it / T           (DAPO, Yu et al. 2025, eq. 12)
        token_level_loss=false       sum_i (sum_t loss_it / n_i) / N    (GRPO, Shao et al. 2024, eq. 3)
        constant_normalizer_tokens   sum_it loss_it / (M * constant)    (Dr. GRPO, Liu et al. 2025, section 3.2)

    Args:
        loss: [sequences, length], or flat [tokens], float32, with gradient: loss of each token.
        mask: bool, in the shape of the loss: tokens in the loss.
        counts: what losses are divided by, counted over the whole optimizer step.
        config: which of the three averages.
        segments: the sequences of a flat microbatch; None: the rows are the sequences.
    """
    # Divided by counts of the step, never of the microbatch: shares add up to one loss under any packing and layout.
    if config.constant_normalizer_tokens is not None:
        return (loss * mask).sum() / (counts.all_sequences * config.constant_normalizer_tokens)
    if config.token_level_loss:
        return token_mean(loss, mask, counts)
    if segments is None:  # row by row, as the definition has it
        return ((loss * mask).sum(dim=1, keepdim=True) / response_size(mask, None)).sum() / counts.sequences
    return (loss * mask / response_size(mask, segments)).sum() / counts.sequences
