"""Estimators of the KL divergence between two policies from sampled tokens."""

from __future__ import annotations

from torch import Tensor


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) from tokens drawn from the policy: r - 1 - log r with r = reference / policy.

    Schulman 2020, "Approximating KL Divergence", estimator k3: unbiased, never negative, and of lower variance than the
    plain log ratio.

    Args:
        logprobs: of the sampled tokens under the policy, any shape, floating point.
        reference_logprobs: the same under the reference.

    Returns:
        One estimate per token, in the shape of the arguments.
    """
    log_ratio = reference_logprobs - logprobs
    return log_ratio.expm1() - log_ratio
