"""Policy-gradient objectives of a token: clipped (PPO, GRPO, GSPO), CISPO, SAPO, REINFORCE."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_grpo.losses.loss import bounded_exp, response_mean, token_mean

if TYPE_CHECKING:
    from megatron_grpo.config.loss_schema import LossConfig
    from megatron_grpo.losses.loss import GlobalCounts, Segments


class Surrogate(NamedTuple):
    """The objective of each token and its statistics."""

    objective: Tensor
    """[sequences, length], float32, with gradient: what is maximised."""
    ratio: Tensor
    """[sequences, length], float32: probability under the current policy over that under the old one, of the token or
    (GSPO) of the response."""
    clamped: Tensor
    """[sequences, length], float32: the probability ratio within its bounds."""
    low: Tensor
    """[sequences, length], bool: where clipping the ratio from below changed the gradient."""
    high: Tensor
    """[sequences, length], bool: where clipping the ratio from above changed the gradient."""
    dual: Tensor
    """[sequences, length], bool: where dual clipping took the gradient away."""

    def metrics(self, mask: Tensor, counts: GlobalCounts) -> dict[str, Tensor]:
        """Shares of means over the step's tokens, and extremes of the ratio; mask [sequences, length], bool."""
        infinity = self.ratio.new_tensor(float("inf"))
        return {
            "probs_ratio": token_mean(self.ratio, mask, counts),
            "probs_ratio_clamped": token_mean(self.clamped, mask, counts),
            "probs_ratio_min": torch.where(mask, self.ratio, infinity).amin(),
            "probs_ratio_max": torch.where(mask, self.ratio, -infinity).amax(),
            "clip_fraction_low": token_mean(self.low, mask, counts),
            "clip_fraction_high": token_mean(self.high, mask, counts),
            "clip_fraction_dual": token_mean(self.dual, mask, counts),
        }


def surrogate(
    curr: Tensor,
    prev: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig,
    segments: Segments | None = None,
) -> Surrogate:
    """The policy-gradient objective that the configuration names, at each token.

    The response's ratio s comes as sg(s) pi / sg(pi) at each of its tokens (GSPO-token, Zheng et al. 2025, eq. 14):
    with one advantage for all tokens of the response that is the value and the gradient of GSPO, and advantages that
    differ from token to token (PPO, REINFORCE++) keep their places.

    Args:
        curr: [sequences, length], float32, with gradient: log-probabilities under the current policy; 0 outside the
            mask.
        prev: [sequences, length], float32, without gradient: those under the policy at the start of the step.
        advantages: [sequences, length], float32: advantage of each token.
        mask: [sequences, length], bool: tokens in the loss.
        config: which objective, and the bounds of the ratio.
        segments: the sequences of a flat microbatch, whose tensors are [tokens]; None: the rows are the sequences.
    """
    log_ratio = curr - prev
    if config.sequence_level_importance_ratios:
        # The value is the response's, the gradient the token's own: the last term has value 0.
        log_ratio = response_mean(log_ratio, mask, segments) + (curr - curr.detach())
    ratio = bounded_exp(log_ratio)
    if config.use_cispo:
        return _cispo(curr, ratio, advantages, config)
    if config.use_sapo:
        return _unclipped(_sapo(ratio, advantages, config), ratio)
    if config.disable_ppo_ratio:
        return _unclipped(advantages * curr, ratio)
    return _clipped(ratio, advantages, config)


def _clipped(ratio: Tensor, advantages: Tensor, config: LossConfig) -> Surrogate:
    """min(r A, clip(r) A), and at least c A where A < 0 with dual clipping.

    Schulman et al. 2017, eq. 7; asymmetric bounds: DAPO (Yu et al. 2025, eq. 10); dual clipping: Ye et al. 2020, eq. 5;
    with the response's ratio: GSPO (Zheng et al. 2025, eq. 5). Ratio and advantages are [sequences, length], float32.
    """
    low, high = 1.0 - config.ratio_clip_min, 1.0 + config.clip_max
    clamped = ratio.clamp(low, high)
    # The minimum is pessimistic: clipping ends the reward for moving on, but not the gradient that leads back.
    objective = torch.minimum(ratio * advantages, clamped * advantages)
    negative = advantages < 0
    dual = torch.zeros_like(negative)
    if config.ratio_clip_c is not None:
        # Where A < 0 the minimum falls without limit as the ratio grows: one stray token could dominate the step.
        bound = config.ratio_clip_c * advantages
        dual = negative & (objective < bound)
        objective = torch.where(negative, torch.maximum(objective, bound), objective)
    return Surrogate(
        objective=objective,
        ratio=ratio,
        clamped=clamped,
        low=negative & (ratio < low),
        high=(advantages > 0) & (ratio > high),
        dual=dual,
    )


def _cispo(curr: Tensor, ratio: Tensor, advantages: Tensor, config: LossConfig) -> Surrogate:
    """stop_gradient(clip(r)) A log pi (MiniMax-M1, 2025, eqs. 4 and 5): bounded weights, and no token is left out.

    Log-probabilities, ratio and advantages are [sequences, length], float32.
    """
    low, high = 1.0 - config.ratio_clip_min, 1.0 + config.clip_max
    # Detached: the clamp would else have no gradient outside its bounds, and those tokens would be lost.
    clamped = ratio.detach().clamp(low, high)
    return Surrogate(
        objective=clamped * advantages * curr,
        ratio=ratio,
        clamped=clamped,
        low=ratio < low,
        high=ratio > high,
        dual=torch.zeros_like(advantages, dtype=torch.bool),
    )


def _sapo(ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """(4 / tau) sigmoid(tau (r - 1)) A (Gao et al. 2025, eqs. 5 and 6), [sequences, length], float32."""
    # The slope of the sigmoid at 0 is 1/4: with 4 / tau the gradient at r = 1 is that of REINFORCE for every tau.
    tau = torch.where(advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg).to(ratio.dtype)
    return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages


def _unclipped(objective: Tensor, ratio: Tensor) -> Surrogate:
    """An objective without clipping; both tensors [sequences, length], float32."""
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(objective=objective, ratio=ratio, clamped=ratio, low=nowhere, high=nowhere, dual=nowhere)
