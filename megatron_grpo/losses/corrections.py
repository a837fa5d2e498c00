"""Factors of the objective by name: importance weights against the engines' mismatch, and masks.

A factor is a function. Parameters with a name of `INPUTS` get tensors, in one of the forms in loss.py and without
gradient; those with the name of a key of loss_fn get its value. It returns the factor of each token, float32, and where
it changed or dropped a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.config.formulas import CORRECTIONS
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.losses.loss import bounded_exp
from megatron_grpo.losses.named_formula import NamedFormula, make_formula
from megatron_grpo.losses.objectives import Responses

INPUTS = {
    "weights": "importance weight, training / sampling probability; of the response where it counts as one (GSPO)",
    "log_weights": "log of the token's importance weight",
    "staleness": "log of the ratio sampling / current policy",
    "advantages": "advantage of the token",
    "responses": "sums and means over whole responses (`Responses`)",
    "selected": "True for tokens that the rule chose among all of the step, bool",
}
"""Tensors that a factor may take, by the name of the parameter."""


def make_corrections(config: LossConfig) -> tuple[NamedFormula, ...]:
    """Make the configured factors, in their order."""
    return tuple(
        make_formula(
            f"loss_fn.corrections={name}",
            f"{__name__}.{CORRECTIONS[name].function}",
            inputs=INPUTS,
            keys=vars(config),
            options={},
            folders=(),
        )
        for name in config.chosen_corrections
    )


def correction_factor(
    config: LossConfig, corrections: Iterable[NamedFormula], prev: Tensor, inputs: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Product of the factors of each token, and where some factor changed it.

    A weight w is that of a token, or, where a response counts as one (GSPO), that of the response, the product over its
    tokens. Tokens of factor 0 still count in the denominator of the loss.

    Args:
        prev: log-probabilities in training before the step, in one of the forms in loss.py, with 0 outside the mask.
        inputs: tensors of `objectives.INPUTS` in the same form.
    """
    # Detached: a factor is a constant of the sample; a gradient through it would change the objective.
    generation, responses = inputs["sampling_logprobs"], inputs["responses"]
    log_weights, staleness = (prev - generation).detach(), (generation - inputs["logprobs"]).detach()
    weights = bounded_exp(responses.sum(log_weights) if config.averages_responses else log_weights)
    has_own_weight = config.has_weights and config.chosen_weight is None
    factor, is_changed = weights if has_own_weight else torch.ones_like(weights), torch.zeros_like(inputs["mask"])
    for correction in corrections:
        values, changes = correction(
            **{**inputs, "weights": weights, "log_weights": log_weights, "staleness": staleness}
        )
        factor, is_changed = factor * values, is_changed | changes
    return factor, is_changed


def truncate(weights: Tensor, *, truncated_importance_sampling_ratio: float) -> tuple[Tensor, Tensor]:
    """min(w, M) (Yao et al. 2025, truncated importance sampling)."""
    high = truncated_importance_sampling_ratio
    return weights.clamp(max=high), weights > high


def truncate_responses(
    log_weights: Tensor, responses: Responses, *, truncated_importance_sampling_ratio: float
) -> tuple[Tensor, Tensor]:
    """min(W, M), W the product of the response's weights (truncation by sequence)."""
    return truncate(
        bounded_exp(responses.sum(log_weights)), truncated_importance_sampling_ratio=truncated_importance_sampling_ratio
    )


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


def keep_close_responses(
    log_weights: Tensor, responses: Responses, *, sequence_mask_min: float, sequence_mask_max: float
) -> tuple[Tensor, Tensor]:
    """1 where the geometric mean of the response's weights is within limits, else 0."""
    means = bounded_exp(responses.mean(log_weights))
    return _keep_within(means, torch.ones_like(means), sequence_mask_min, sequence_mask_max)


def drop_stale_failures(
    staleness: Tensor, advantages: Tensor, responses: Responses, *, off_policy_mask_threshold: float
) -> tuple[Tensor, Tensor]:
    """0 where A < 0 and mean log(sampling / current) > delta, else 1.

    Off-policy sequence masking of DeepSeek-V3.2 (2025, arXiv:2512.02556). The mean is over the response's
    tokens: a bad response that the policy has left is no longer pushed down.
    """
    is_stale = (advantages < 0) & (responses.mean(staleness) > off_policy_mask_threshold)
    return (~is_stale).to(staleness.dtype), is_stale


def drop_diverging_tokens(
    log_weights: Tensor, advantages: Tensor, responses: Responses, *, divergence_mask_threshold: float
) -> tuple[Tensor, Tensor]:
    """0 where D > delta and A log w > 0, else 1.

    The filter of VACO (Honari et al. 2026, arXiv:2603.01365) for responses. D, half the mean |w - 1| of the response,
    estimates the total variation between the trainer's policy and the engine's; tokens whose update would increase it
    are left out.
    """
    variation = responses.mean((bounded_exp(log_weights) - 1).abs()) / 2
    is_leaving = (variation > divergence_mask_threshold) & (advantages * log_weights > 0)
    return (~is_leaving).to(log_weights.dtype), is_leaving


def keep_selected(weights: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """1 for tokens that the rule chose among all of the step, else 0."""
    return selected.to(weights.dtype), ~selected


def _keep_within(values: Tensor, weights: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    is_out = (values < low) | (values > high)
    return torch.where(is_out, torch.zeros_like(weights), weights), is_out
