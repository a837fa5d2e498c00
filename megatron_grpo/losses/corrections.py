"""Corrections for the mismatch of engine and trainer: importance weights, and limits of them by name."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_grpo.config.formulas import CORRECTIONS
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.losses.loss import Segments, bounded_exp
from megatron_grpo.losses.named_formula import make_formula
from megatron_grpo.losses.objectives import Responses

INPUTS = ("weights", "log_weights", "responses")
"""Tensors that a limit may take, by the name of the parameter; it returns new weights, and where it changed them."""


def sampling_correction(
    prev: Tensor, generation: Tensor, mask: Tensor, config: LossConfig, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """Importance weights, training / sampling probability, limited as configured.

    A weight w is that of a token, or, where a response counts as one (GSPO), that of the response, the product over its
    tokens. Tokens of weight 0 still count in the denominator of the loss. Tensors have one of the forms in loss.py,
    with 0 outside the mask; `prev` and `generation` are log-probabilities in the training framework and the engine,
    float32.

    Returns the factor of each token's policy-gradient term, float32, without gradient; and where a limit changed it.
    """
    # Detached: the weight is a constant of the sample; a gradient through it would change the objective.
    log_weights, responses = (prev - generation).detach(), Responses(mask, segments)
    weights = bounded_exp(responses.sum(log_weights) if config.averages_responses else log_weights)
    name = config.truncated_importance_sampling_type
    if name is None:
        return weights, torch.zeros_like(mask)
    limit = make_formula(
        f"loss_fn.truncated_importance_sampling_type={name}",
        f"{__name__}.{CORRECTIONS[name].function}",
        inputs=INPUTS,
        keys=vars(config),
        options={},
        folders=(),
    )
    limited: tuple[Tensor, Tensor] = limit(weights=weights, log_weights=log_weights, responses=responses)
    return limited


def truncate(weights: Tensor, *, truncated_importance_sampling_ratio: float) -> tuple[Tensor, Tensor]:
    """min(w, M) (Yao et al. 2025, truncated importance sampling)."""
    high = truncated_importance_sampling_ratio
    return weights.clamp(max=high), weights > high


def mask_tokens(
    weights: Tensor, *, truncated_importance_sampling_ratio_min: float, truncated_importance_sampling_ratio: float
) -> tuple[Tensor, Tensor]:
    """w where m <= w <= M, else 0 (IcePop, Ling team 2025)."""
    return _keep_within(weights, weights, truncated_importance_sampling_ratio_min, truncated_importance_sampling_ratio)


def mask_responses(
    weights: Tensor,
    log_weights: Tensor,
    responses: Responses,
    *,
    truncated_importance_sampling_ratio_min: float,
    truncated_importance_sampling_ratio: float,
) -> tuple[Tensor, Tensor]:
    """Weights of responses whose geometric mean is within limits, else 0.

    w where m <= g <= M, else 0, with g the geometric mean of the response's weights.
    """
    # A geometric mean does not grow with the length of the response, so one pair of limits serves all lengths.
    means = bounded_exp(responses.mean(log_weights))
    return _keep_within(means, weights, truncated_importance_sampling_ratio_min, truncated_importance_sampling_ratio)


def _keep_within(values: Tensor, weights: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    is_out = (values < low) | (values > high)
    return torch.where(is_out, torch.zeros_like(weights), weights), is_out
