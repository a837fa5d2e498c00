"""Divergences between policies, estimated from sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_grpo.losses.loss import MAX_LOG_RATIO, bounded_exp

KLType = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kl_type: KLType,
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """KL(policy || reference), estimated at each token that the policy drew.

    Schulman 2020, "Approximating KL Divergence". With d = log(policy / reference)::

        k1 = d                    unbiased, may be negative
        k2 = d^2 / 2              biased, never negative; its gradient is, in expectation, that of the divergence
        k3 = exp(-d) - 1 + d      unbiased, never negative, of lower variance than k1

    Log-probabilities are those of the sampled tokens, of any shape, which is that of the result. d is limited to
    [-input_clamp, input_clamp] first, the estimate to [-output_clamp, output_clamp]; beyond a limit the gradient is 0.
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


def divergences(prev: Tensor, generation: Tensor) -> dict[str, Tensor]:
    """Divergences of trainer (P) and engine (G), estimated at each token.

    Tokens are drawn from G, and r = P/G is a token's probability ratio. Each estimate is the f(r) of an f-divergence
    with f(1) = f'(1) = 0 (Csiszar 1967), so it is unbiased and never negative:

    - gen_kl_error, KL(G || P): r - 1 - log r (estimator k3 of Schulman 2020, "Approximating KL Divergence");
    - policy_kl_error, KL(P || G): r log r - (r - 1);
    - js_divergence_error, (KL(P || M) + KL(G || M)) / 2 with M = (P + G) / 2: (r log r - (1 + r) log((1 + r) / 2)) / 2.

    `prev` and `generation`: log-probabilities under P and G, in the results' shape; log ratios end at MAX_LOG_RATIO.
    """
    log_ratio = (prev - generation).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits of r - 1 near r = 1, where nearly all tokens are and exp would round them away.
    ratio, ratio_minus_one = log_ratio.exp(), log_ratio.expm1()
    mixture = torch.log1p(ratio_minus_one / 2)  # log((1 + r) / 2), exact near r = 1
    return {
        "gen_kl_error": ratio_minus_one - log_ratio,
        "policy_kl_error": ratio * log_ratio - ratio_minus_one,
        "js_divergence_error": (ratio * log_ratio - (1 + ratio) * mixture) / 2,
    }


def effective_sample_size(mean_weight: float, mean_squared_weight: float) -> float:
    """Effective share of weighted samples: (sum w)^2 / (n sum w^2).

    Kish 1965. The arguments are means over all n samples. The result is 1 when all weights are equal, 1/n when one
    sample has all the weight, and 0 without any weight.
    """
    return mean_weight**2 / mean_squared_weight if mean_squared_weight > 0 else 0.0


def find_inconsistent_sequences(
    loss_mask: Tensor, prev: Tensor, generation: Tensor, lengths: list[int], threshold: float
) -> tuple[Tensor, dict[str, float]]:
    """Find responses whose mean of exp(|prev - generation|) is above the threshold.

    The mean is over tokens with a `loss_mask` of 1, without those that a filter of sampling removes in training (-inf
    in `prev`). Tensors are [sum(lengths)], float32; `prev` and `generation` are log-probabilities in the training
    framework and the engine. Returns [sequences], bool: true above the threshold; and the metrics
    max_seq_mult_prob_error and num_masked_seqs.
    """
    is_compared = (loss_mask > 0) & ~prev.isneginf()
    errors = torch.where(is_compared, bounded_exp((prev - generation).abs()), torch.zeros_like(prev))
    sums = torch.stack([piece.sum() for piece in errors.split(lengths)])
    tokens = torch.stack([piece.sum() for piece in is_compared.float().split(lengths)])
    means = sums / tokens.clamp(min=1)
    # Written as "not within" because a NaN mean has to be masked as well.
    is_beyond = ~(means <= threshold) & (tokens > 0)
    return is_beyond, {"max_seq_mult_prob_error": float(means.max()), "num_masked_seqs": float(is_beyond.sum())}


ROUNDING_SHARE = 1e-4  # a difference from a float32 mean below this share of it is a rounding error


def error_without_worst(error: float, worst: float, tokens: float) -> float:
    """token_mult_prob_error of a step if its worst token were in agreement.

    `error` is the mean over the `tokens` in the loss, `worst` the largest of a token; agreement is 1.
    """
    # A single token says nothing about a step: in bfloat16 a near tie may send it to another expert, and the
    # exponential makes one difference of 10 nats outweigh thousands of tokens.
    rest = error - (worst - 1.0) / tokens
    return rest if not rest <= ROUNDING_SHARE * error else 1.0  # NaN stays NaN
