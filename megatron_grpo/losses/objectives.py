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
from megatron_grpo.losses.loss import (
    MAX_LOG_RATIO,
    Segments,
    bounded_exp,
    is_extreme,
    mask_values,
    onward_sum,
    response_size,
    response_sum,
)
from megatron_grpo.losses.named_formula import NamedFormula

INPUTS = {
    "logprobs": "log-probability under the policy that learns, with gradient",
    "old_logprobs": "log-probability in training, under the policy at the start of the step",
    "sampling_logprobs": "log-probability in the engine, when the token was drawn",
    "log_ratio": "logprobs - old_logprobs",
    "advantages": "advantage of the token",
    "mask": "True for tokens in the loss, bool",
    "responses": "sums and means over whole responses (`Responses`)",
    "selected": "True for tokens that a rule chose among all of the step, bool; none without a rule",
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

    def sum_onwards(self, values: Tensor, discount: float) -> Tensor:
        """Sum of each token's value and later ones, discounted by their distance."""
        return onward_sum(values, self.mask, self.segments, discount)

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


def luspo(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    responses: Responses,
    *,
    ratio_clip_min: float,
    ratio_clip_max: float | None,
    ratio_clip_c: float | None,
) -> TokenLoss:
    """`gspo` times the tokens of the response (Liu et al. 2026, arXiv:2602.05261).

    The average over responses then is of sums over their tokens, so a token of a long response counts no less.
    """
    ratio = bounded_exp(responses.mean(log_ratio) + (logprobs - logprobs.detach()))
    loss, statistics = _clip(ratio, advantages, ratio_clip_min, ratio_clip_max, ratio_clip_c)
    return loss * responses.count_tokens(), statistics


def gmpo(
    log_ratio: Tensor,
    advantages: Tensor,
    responses: Responses,
    *,
    ratio_clip_min: float,
    ratio_clip_max: float | None,
) -> TokenLoss:
    """-s A, s the geometric mean of clipped ratios.

    GMPO (Zhao et al. 2025, arXiv:2507.20673). Log ratios are clipped token by token: from above where A > 0,
    from below where A < 0. As in `gspo`, s enters each token with the gradient of its own clipped log ratio.
    """
    high = ratio_clip_min if ratio_clip_max is None else ratio_clip_max
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-ratio_clip_min))
    ratio = bounded_exp(responses.mean(bounded) + (bounded - bounded.detach()))
    return -(ratio * advantages), {
        "probs_ratio": bounded_exp(log_ratio.detach()),
        "probs_ratio_clamped": ratio,
        "clip_fraction_low": (advantages < 0) & (log_ratio < -ratio_clip_min),
        "clip_fraction_high": (advantages > 0) & (log_ratio > high),
    }


def fipo(
    log_ratio: Tensor,
    advantages: Tensor,
    responses: Responses,
    *,
    ratio_clip_min: float,
    ratio_clip_max: float | None,
    ratio_clip_c: float | None,
    fipo_half_life: float,
    fipo_clip_min: float,
    fipo_clip_max: float,
) -> TokenLoss:
    """`clipped` with A times the influence of later tokens (Ma et al. 2026, arXiv:2603.19835).

    The influence is clip(exp(sum over k >= t of gamma^(k - t) log r_k)), without gradient, gamma = 2^(-1 / half-life):
    tokens after which the policy has become likelier count more. Ratios above ratio_clip_c are left out of the sum.
    """
    later = log_ratio.detach()
    if ratio_clip_c is not None:
        later = torch.where(bounded_exp(later) > ratio_clip_c, torch.zeros_like(later), later)
    influence = bounded_exp(responses.sum_onwards(later, 0.5 ** (1 / fipo_half_life)))
    weighted = advantages * influence.clamp(1 - fipo_clip_min, 1 + fipo_clip_max)
    return _clip(bounded_exp(log_ratio), weighted, ratio_clip_min, ratio_clip_max, ratio_clip_c)


def clip_cov(
    log_ratio: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    ratio_clip_min: float,
    ratio_clip_max: float | None,
) -> TokenLoss:
    """`clipped`, 0 for selected tokens (Clip-Cov, Cui et al. 2025, arXiv:2505.22617)."""
    loss, statistics = _clip(bounded_exp(log_ratio), advantages, ratio_clip_min, ratio_clip_max, None)
    return torch.where(selected, torch.zeros_like(loss), loss), statistics


def kl_cov(log_ratio: Tensor, advantages: Tensor, selected: Tensor, *, kl_cov_weight: float) -> TokenLoss:
    """-r A, plus weight |log r| for selected tokens (Cui et al. 2025)."""
    ratio = bounded_exp(log_ratio)
    penalty = kl_cov_weight * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
    return torch.where(selected, penalty, torch.zeros_like(penalty)) - ratio * advantages, {"probs_ratio": ratio}


def dppo_tv(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence_clip_min: float,
    divergence_clip_max: float,
    ratio_clip_c: float | None,
) -> TokenLoss:
    """-sg(min(r, c)) A log pi for tokens near mu, else 0.

    r = pi / mu. DPPO with the binary total variation |pi - mu| of the sampled token against all others (Qi et al. 2026,
    arXiv:2602.04879, eqs. 11-13). A token is left out if its update would move pi further away.
    """
    shift = logprobs.detach().exp() - sampling_logprobs.exp()
    is_out = torch.where(advantages > 0, shift > divergence_clip_max, shift < -divergence_clip_min)
    return _keep_trusted(logprobs, sampling_logprobs, advantages, is_out, ratio_clip_c)


def dppo_kl(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence_clip_min: float,
    divergence_clip_max: float,
    ratio_clip_c: float | None,
) -> TokenLoss:
    """`dppo_tv` with the binary KL(mu || pi) in place of the variation (eq. 14)."""
    current, sampling = logprobs.detach(), sampling_logprobs
    # Probabilities of all other tokens. A probability rounded to 1 leaves them an epsilon, not 0 with an infinite log.
    epsilon = torch.finfo(current.dtype).eps
    rest, sampling_rest = ((1 - values.exp()).clamp(min=epsilon) for values in (current, sampling))
    divergence = sampling.exp() * (sampling - current) + sampling_rest * (sampling_rest / rest).log()
    is_beyond_low, is_beyond_high = divergence > divergence_clip_min, divergence > divergence_clip_max
    is_out = torch.where(advantages > 0, (current > sampling) & is_beyond_high, (current < sampling) & is_beyond_low)
    return _keep_trusted(logprobs, sampling_logprobs, advantages, is_out, ratio_clip_c)


def _keep_trusted(
    logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, is_out: Tensor, highest: float | None
) -> TokenLoss:
    ratio = bounded_exp(logprobs.detach() - sampling_logprobs)
    clamped = ratio if highest is None else ratio.clamp(max=highest)
    loss = -(clamped * advantages * logprobs)
    return torch.where(is_out, torch.zeros_like(loss), loss), {
        "probs_ratio": ratio,
        "probs_ratio_clamped": clamped,
        "clip_fraction_low": is_out & (advantages < 0),
        "clip_fraction_high": is_out & (advantages > 0),
    }


def dro(logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, *, dro_beta: float) -> TokenLoss:
    """-A log pi + beta / 2 log(pi / mu)^2.

    DRO: Richemond et al. 2024, arXiv:2405.19107.
    """
    return dro_beta / 2 * squared_log_ratio(logprobs, sampling_logprobs) - advantages * logprobs


def squared_log_ratio(logprobs: Tensor, sampling_logprobs: Tensor) -> Tensor:
    """log(pi / mu)^2 within the limit of log ratios; beyond, the gradient is 0."""
    return (logprobs - sampling_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()


def vespo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    responses: Responses,
    *,
    vespo_k_pos: float,
    vespo_lambda_pos: float,
    vespo_k_neg: float,
    vespo_lambda_neg: float,
) -> TokenLoss:
    """-sg(W^k exp(lambda (1 - W))) A log pi.

    VESPO (Shen et al. 2026, arXiv:2602.10693). W, pi / mu of the response, is the product over the response's tokens;
    k and lambda are others where A < 0.
    """
    log_weight = responses.sum(logprobs - sampling_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    is_bad, weight = advantages < 0, log_weight.exp()
    power = torch.where(is_bad, vespo_k_neg, vespo_k_pos).to(weight.dtype)
    decay = torch.where(is_bad, vespo_lambda_neg, vespo_lambda_pos).to(weight.dtype)
    kernel = (power * log_weight + decay * (1 - weight)).exp()
    return -(kernel * advantages * logprobs), {"probs_ratio": weight, "probs_ratio_clamped": kernel}


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
