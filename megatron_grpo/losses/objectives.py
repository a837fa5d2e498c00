"""Objectives: the loss of each token, from log-probabilities and advantages.

An objective is a function. Parameters with a name of `INPUTS` get tensors; those with the name of a key of loss_fn get
its value; all others are options (loss_fn.objective_options). It returns the loss of each token, [tokens], with the
gradient of logprobs, and may return statistics besides: tensors of the same shape by name, whose mean over the step's
tokens becomes a metric. It does not average: `loss.loss_share` does, over the whole optimizer step.

Tensors are float32, in one of the forms in loss.py, and 0 outside the mask. A token may depend on others of its
response only, and on these only through `Responses`, which knows ranks that share a response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.config.errors import RunError
from megatron_grpo.losses.loss import Segments, bounded_exp, is_extreme, mask_values, response_size, response_sum
from megatron_grpo.losses.named_formula import NamedFormula

INPUTS = {
    "logprobs": "log-probability under the policy that learns, with gradient",
    "old_logprobs": "log-probability in training, under the policy at the start of the step",
    "sampling_logprobs": "log-probability in the engine, when the token was drawn",
    "log_ratio": "logprobs - old_logprobs",
    "advantages": "advantage of the token",
    "mask": "True for tokens in the loss, bool",
    "responses": "sums and means over whole responses (`Responses`)",
}
"""Tensors that an objective may take, by the name of the parameter."""

Statistics = dict[str, Tensor]
TokenLoss = Tensor | tuple[Tensor, Statistics]


@dataclass(frozen=True, slots=True)
class Responses:
    """Sums over the responses of a microbatch, without gradient."""

    mask: Tensor
    segments: Segments | None

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each response's tokens in the loss, at each of its tokens."""
        return response_sum(values, self.mask, self.segments)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each response's tokens in the loss, at each of its tokens."""
        return self.sum(values) / self.count_tokens()

    def count_tokens(self) -> Tensor:
        """Tokens of each response that are in the loss, at least 1."""
        return response_size(self.mask, self.segments)


def token_loss(objective: NamedFormula, **inputs: Any) -> tuple[Tensor, Statistics]:
    """The loss of each token, and statistics.

    RunError: a function of the user returned something else, or a loss without gradient.
    """
    result = objective(**inputs)
    loss, statistics = result if isinstance(result, tuple) else (result, {})
    if not objective.folders:
        return loss, statistics
    shape = list(inputs["mask"].shape)
    for name, values in {
        "a loss": loss,
        **{f"the statistic {key}": value for key, value in statistics.items()},
    }.items():
        if not isinstance(values, Tensor) or list(values.shape) != shape:
            kind = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"type {type(values).__name__}"
            text = f"{objective.setting} returned {name} of {kind}, and its tokens have shape {shape}"
            raise RunError(f"{text}: return a value for each token, of which the run takes the average")
        if is_extreme(name):
            raise RunError(
                f"{objective.setting} returned {name}; names in _max and _min are extremes, and this is a mean"
            )
    if not loss.requires_grad:
        raise RunError(f"{objective.setting} returned a loss without gradient: no operation leads back to logprobs")
    # Outside the mask log-probabilities are 0, of which log(1 - p) is infinite.
    mask = inputs["mask"]
    return mask_values(loss, mask), {name: mask_values(values, mask) for name, values in statistics.items()}


def clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    ratio_clip_min: float,
    ratio_clip_max: float | None,
    ratio_clip_c: float | None,
) -> TokenLoss:
    """-min(r A, clip(r) A), with dual clipping at c A where A < 0.

    Clipping: Schulman et al. 2017, eq. 7; unlike bounds: DAPO, Yu et al. 2025; dual: Ye et al. 2020.
    """
    return _clip(bounded_exp(log_ratio), advantages, ratio_clip_min, ratio_clip_max, ratio_clip_c)


def on_policy(log_ratio: Tensor, advantages: Tensor) -> TokenLoss:
    """-r A for a ratio that is 1 and has the policy's gradient."""
    ratio = bounded_exp(log_ratio)
    return -(ratio * advantages), {"probs_ratio": ratio}


def gspo(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    responses: Responses,
    *,
    ratio_clip_min: float,
    ratio_clip_max: float | None,
    ratio_clip_c: float | None,
) -> TokenLoss:
    """`clipped` with the response's ratio.

    The ratio s is the geometric mean of its tokens' ratios. It enters each token as sg(s) pi / sg(pi), where sg stops
    the gradient (GSPO-token, Zheng et al. 2025, eq. 14). With one advantage for the whole response this has the value
    and the gradient of GSPO, and it also allows advantages that differ from token to token (PPO, REINFORCE++).
    """
    # The value is the response's, the gradient the token's own: the last term has value 0.
    ratio = bounded_exp(responses.mean(log_ratio) + (logprobs - logprobs.detach()))
    return _clip(ratio, advantages, ratio_clip_min, ratio_clip_max, ratio_clip_c)


def cispo(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, *, ratio_clip_min: float, ratio_clip_max: float | None
) -> TokenLoss:
    """-stop_gradient(clip(r)) A log pi (MiniMax-M1, 2025, eqs. 4 and 5)."""
    ratio = bounded_exp(log_ratio)
    low, high = _clip_bounds(ratio_clip_min, ratio_clip_max)
    # Detached, since the clamp would remove the gradient of tokens outside its bounds; here every token has one.
    clamped = ratio.detach().clamp(low, high)
    return -(clamped * advantages * logprobs), {
        "probs_ratio": ratio,
        "probs_ratio_clamped": clamped,
        "clip_fraction_low": ratio < low,
        "clip_fraction_high": ratio > high,
    }


def sapo(
    log_ratio: Tensor, advantages: Tensor, *, sapo_temperature_pos: float, sapo_temperature_neg: float
) -> TokenLoss:
    """-4 / tau sigmoid(tau (r - 1)) A (Gao et al. 2025, eqs. 5-6)."""
    ratio = bounded_exp(log_ratio)
    # The slope of the sigmoid at 0 is 1/4: with 4 / tau the gradient at r = 1 is that of REINFORCE for every tau.
    tau = torch.where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg).to(ratio.dtype)
    return -(4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages), {"probs_ratio": ratio}


def reinforce(logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """-A log pi (Williams 1992)."""
    return -(advantages * logprobs)


def _clip(
    ratio: Tensor,
    advantages: Tensor,
    ratio_clip_min: float,
    ratio_clip_max: float | None,
    ratio_clip_c: float | None,
) -> TokenLoss:
    low, high = _clip_bounds(ratio_clip_min, ratio_clip_max)
    clamped = ratio.clamp(low, high)
    # The minimum is pessimistic: clipping removes the gradient that moves further away, not the one that leads back.
    objective = torch.minimum(ratio * advantages, clamped * advantages)
    negative = advantages < 0
    statistics = {
        "probs_ratio": ratio,
        "probs_ratio_clamped": clamped,
        "clip_fraction_low": negative & (ratio < low),
        "clip_fraction_high": (advantages > 0) & (ratio > high),
    }
    if ratio_clip_c is not None:
        # Where A < 0 the minimum falls without limit as the ratio grows: one stray token could dominate the step.
        bound = ratio_clip_c * advantages
        statistics["clip_fraction_dual"] = negative & (objective < bound)
        objective = torch.where(negative, torch.maximum(objective, bound), objective)
    return -objective, statistics


def _clip_bounds(ratio_clip_min: float, ratio_clip_max: float | None) -> tuple[float, float]:
    """Bounds of the ratio; without an upper distance the lower one counts."""
    return 1.0 - ratio_clip_min, 1.0 + (ratio_clip_min if ratio_clip_max is None else ratio_clip_max)
