"""Estimators of the KL divergence between two policies from sampled tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLType = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kl_type: KLType,
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """KL(policy || reference) from tokens drawn from the policy (Schulman 2020, "Approximating KL Divergence").

    With d = log(policy / reference)::

        k1 = d                    unbiased, may be negative
        k2 = d^2 / 2              biased, never negative; its gradient is, in expectation, that of the divergence
        k3 = exp(-d) - 1 + d      unbiased, never negative, of lower variance than k1

    Args:
        logprobs: [...], floating point, of any shape: log-probabilities of the sampled tokens under the policy.
        reference_logprobs: [...], floating point, in the shape of `logprobs`: those under the reference policy.
        kl_type: which of the three estimators.
        input_clamp: d is limited to [-input_clamp, input_clamp] first.
        output_clamp: the estimate is limited to [-output_clamp, output_clamp]. Beyond a limit the gradient is 0.

    Returns:
        [...], in shape and dtype of `logprobs`: one estimate per token.
    """
    log_ratio = logprobs - reference_logprobs
    if input_clamp is not None:
        log_ratio = log_ratio.clamp(-input_clamp, input_clamp)
    if kl_type == "k1":
        estimate = log_ratio
    elif kl_type == "k2":
        estimate = log_ratio.square() / 2
    else:
        # expm1: near d = 0, where most tokens are, exp(-d) - 1 would keep none of the digits that matter.
        estimate = (-log_ratio).expm1() + log_ratio
    if output_clamp is not None:
        estimate = estimate.clamp(-output_clamp, output_clamp)
    return estimate
