"""The clipped policy-gradient loss of GRPO and PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_grpo.algorithms.kl import kl_k3

if TYPE_CHECKING:
    from megatron_grpo.config.schema import LossConfig
    from megatron_grpo.policy.interface import GlobalCounts


class ClippedPGLossFn:
    """A `policy.interface.LossFunction`: clipped surrogate (Schulman et al. 2017, eq. 7) plus a KL penalty.

    Per token, with ratio = exp(curr - prev) and advantage A::

        surrogate = min(ratio * A, clip(ratio, 1 - ratio_clip_min, 1 + ratio_clip_max) * A)
        surrogate = max(surrogate, ratio_clip_c * A)        where A < 0 and dual clipping is on (Ye et al. 2020, eq. 5)
        loss      = -correction * surrogate + reference_policy_kl_penalty * weight * k3(curr, reference)

    - `prev` are the training framework's log-probabilities at the start of the step. Without "prev_logprobs" the step
      is the only one on its samples, prev is curr without gradient, and the ratio is 1 with the policy's gradient.
    - correction = exp(prev - generation) with use_importance_sampling_correction, else 1. It is a constant of the
      sample: no gradient, and it does not touch the KL term.
    - weight = ratio with use_on_policy_kl_approximation, else 1. The ratio keeps its gradient: then the expected
      gradient of the term is that of KL(policy || reference), also at ratio 1. Without it the gradient of k3 alone is
      that of KL(reference || policy) when sampling from the policy, as in the original GRPO.

    Entries outside loss_mask may hold anything, infinities and NaN included: they are replaced before any arithmetic.
    """

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    def __call__(
        self, curr_logprobs: Tensor, tokens: dict[str, Tensor], counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `LossFunction`.

        Args:
            curr_logprobs: [sequences, length], float32, with gradient.
            tokens: "loss_mask" (0 or 1), "advantages", "generation_logprobs"; optionally "prev_logprobs"; and
                "reference_logprobs" when the KL penalty is not 0. Each [sequences, length].
            counts: of the whole step.

        Returns:
            The microbatch's share of the loss, and metrics: shares of means over the step's tokens, except `loss`
            (normalised as the loss is) and names ending in _max and _min, whose neutral values are -inf and inf.

        Raises:
            ValueError: the KL penalty is not 0 and there are no reference log-probabilities.
        """
        config = self.config
        mask = tokens["loss_mask"] > 0
        curr = _masked(curr_logprobs, mask)
        generation = _masked(tokens["generation_logprobs"], mask)
        advantages = _masked(tokens["advantages"], mask)
        prev = _masked(tokens["prev_logprobs"], mask) if "prev_logprobs" in tokens else curr.detach()

        clipped = _clipped_surrogate(curr, prev, advantages, config)
        correction = (prev - generation).exp()
        loss = -clipped.surrogate
        if config.use_importance_sampling_correction:
            loss = loss * correction
        kl: Tensor | None = None
        if "reference_logprobs" in tokens:
            kl = kl_k3(curr, _masked(tokens["reference_logprobs"], mask))
            if config.use_on_policy_kl_approximation:
                kl = kl * clipped.ratio
            loss = loss + config.reference_policy_kl_penalty * kl
        elif config.reference_policy_kl_penalty:
            raise ValueError("loss_fn.reference_policy_kl_penalty needs reference_logprobs, and there are none")

        total = self._share(loss, mask, counts)
        with torch.no_grad():
            metrics = {"loss": total.detach().clone()}
            metrics |= _consistency_metrics(curr, prev, generation, mask, counts)
            metrics |= clipped.metrics(mask, counts)
            if kl is not None:
                metrics["kl_penalty"] = _token_mean(kl, mask, counts)
        return total, metrics

    def _share(self, loss: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
        """This microbatch's part of the mean over all tokens, or over sequences of the mean over their tokens."""
        if self.config.token_level_loss:
            return _token_mean(loss, mask, counts)
        per_sequence = (loss * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return per_sequence.sum() / max(counts.sequences, 1.0)


class _Clipped(NamedTuple):
    """The surrogate of each token and what is reported of it; every tensor [sequences, length]."""

    surrogate: Tensor
    ratio: Tensor
    clamped: Tensor
    low: Tensor
    """Where clipping from below took the gradient away."""
    high: Tensor
    """The same from above."""
    dual: Tensor
    """Where dual clipping took the gradient away."""

    def metrics(self, mask: Tensor, counts: GlobalCounts) -> dict[str, Tensor]:
        infinity = self.ratio.new_tensor(float("inf"))
        return {
            "probs_ratio": _token_mean(self.ratio, mask, counts),
            "probs_ratio_clamped": _token_mean(self.clamped, mask, counts),
            "probs_ratio_min": torch.where(mask, self.ratio, infinity).amin(),
            "probs_ratio_max": torch.where(mask, self.ratio, -infinity).amax(),
            "clip_fraction_low": _token_mean(self.low, mask, counts),
            "clip_fraction_high": _token_mean(self.high, mask, counts),
            "clip_fraction_dual": _token_mean(self.dual, mask, counts),
        }


def _clipped_surrogate(curr: Tensor, prev: Tensor, advantages: Tensor, config: LossConfig) -> _Clipped:
    low, high = 1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max
    ratio = (curr - prev).exp()
    clamped = ratio.clamp(low, high)
    surrogate = torch.minimum(ratio * advantages, clamped * advantages)
    negative = advantages < 0
    dual = torch.zeros_like(negative)
    if config.ratio_clip_c is not None:
        bound = config.ratio_clip_c * advantages
        dual = negative & (surrogate < bound)
        surrogate = torch.where(negative, torch.maximum(surrogate, bound), surrogate)
    return _Clipped(
        surrogate=surrogate,
        ratio=ratio,
        clamped=clamped,
        low=negative & (ratio < low),
        high=(advantages > 0) & (ratio > high),
        dual=dual,
    )


def _consistency_metrics(
    curr: Tensor, prev: Tensor, generation: Tensor, mask: Tensor, counts: GlobalCounts
) -> dict[str, Tensor]:
    """How far training and generation disagree about the sampled tokens, and the policy's entropy.

    token_mult_prob_error is the mean of exp(|prev - generation|), 1 when both frameworks agree exactly;
    sampling_importance_ratio the mean of exp(prev - generation), its bias; approx_entropy the mean of
    -exp(curr - generation) * curr, an importance-weighted Monte-Carlo estimate.
    """
    error = (prev - generation).abs().exp()
    return {
        "token_mult_prob_error": _token_mean(error, mask, counts),
        "token_mult_prob_error_max": torch.where(mask, error, error.new_tensor(float("-inf"))).amax(),
        "sampling_importance_ratio": _token_mean((prev - generation).exp(), mask, counts),
        "approx_entropy": _token_mean(-(curr - generation).exp() * curr, mask, counts),
    }


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values inside the mask and 0 outside, whatever stands there."""
    return torch.where(mask, values, torch.zeros_like(values))


def _token_mean(values: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """This microbatch's share of the mean over all tokens of the step (0 when the step has none)."""
    return (values * mask).sum() / max(counts.tokens, 1.0)
