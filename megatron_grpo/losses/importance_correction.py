"""Importance weights between the policy as the training framework and as the generation engine computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_grpo.losses.token_means import bounded_exp, response_mean, response_sum

if TYPE_CHECKING:
    from megatron_grpo.config.loss_schema import LossConfig
    from megatron_grpo.losses.segments import Segments


class SamplingCorrection(NamedTuple):
    """Weights of the policy-gradient term, constants of the sample."""

    weights: Tensor
    """[sequences, length], float32, without gradient: factor of each token's policy-gradient term."""
    out_of_bounds: Tensor
    """[sequences, length], bool: where a limit changed the weight."""


def sampling_correction(
    prev: Tensor, generation: Tensor, mask: Tensor, config: LossConfig, segments: Segments | None = None
) -> SamplingCorrection:
    """Weights w = training probability / sampling probability, limited as configured.

    Per token, or with sequence_level_importance_ratios of the whole response (the product over its tokens). Then, with
    limits [m, M]::

        tis            min(w, M)                       (Yao et al. 2025, truncated importance sampling)
        icepop         w where m <= w <= M, else 0     (Ling team 2025, IcePop)
        seq-mask-tis   w where m <= g <= M, else 0     with g the geometric mean of the response's token weights

    Tokens of weight 0 still count in what the loss is divided by.

    Args:
        prev: [sequences, length], float32: log-probabilities in the training framework; 0 outside the mask.
        generation: [sequences, length], float32: log-probabilities in the generation engine; 0 outside the mask.
        mask: [sequences, length], bool: tokens in the loss.
        config: level, kind and limits of the weights.
        segments: the sequences of a flat microbatch, whose tensors are [tokens]; None: the rows are the sequences.
    """
    # Detached: a weight corrects for who drew the sample; a gradient through it would change the objective.
    log_weights = (prev - generation).detach()
    weights = bounded_exp(log_weights)
    if config.sequence_level_importance_ratios:
        weights = bounded_exp(response_sum(log_weights, mask, segments))
    kind = config.truncated_importance_sampling_type
    if kind is None:
        return SamplingCorrection(weights, torch.zeros_like(mask))
    low, high = config.truncated_importance_sampling_ratio_min, config.truncated_importance_sampling_ratio
    assert high is not None, "a truncation without an upper limit"
    if kind == "tis":
        return SamplingCorrection(weights.clamp(max=high), weights > high)
    assert low is not None, "a mask without a lower limit"
    # A geometric mean does not grow with the length of the response, so one pair of limits serves all lengths.
    judged = weights if kind == "icepop" else bounded_exp(response_mean(log_weights, mask, segments))
    out = (judged < low) | (judged > high)
    return SamplingCorrection(torch.where(out, torch.zeros_like(weights), weights), out)
