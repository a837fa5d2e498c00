"""How far training and generation disagree about the sampled tokens, measured from those tokens alone."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_grpo.losses.token_means import bounded, bounded_exp


def divergences(prev: Tensor, generation: Tensor) -> dict[str, Tensor]:
    """Per-token estimates of divergences between the training framework's policy P and the sampling one's, G.

    Tokens are drawn from G; with r = P/G of a token, each estimate is an f-divergence's f(r) with f(1) = f'(1) = 0
    (Csiszar 1967), so it is unbiased and never negative:

    - gen_kl_error, KL(G || P): r - 1 - log r (estimator k3 of Schulman 2020, "Approximating KL Divergence");
    - policy_kl_error, KL(P || G): r log r - (r - 1);
    - js_divergence_error, (KL(P || M) + KL(G || M)) / 2 with M = (P + G) / 2: (r log r - (1 + r) log((1 + r) / 2)) / 2.

    Args:
        prev: log-probabilities under P, of any shape [...], floating point; log ratios are cut off at MAX_LOG_RATIO.
        generation: [...], floating point, in the shape of `prev`: log-probabilities under G.

    Returns:
        gen_kl_error, policy_kl_error and js_divergence_error, each [...] in the shape of `prev`: one estimate a token.
    """
    log_ratio = bounded(prev - generation)
    # expm1 keeps the digits of r - 1 near r = 1, where nearly all tokens are and exp would round them away.
    ratio, ratio_minus_one = log_ratio.exp(), log_ratio.expm1()
    mixture = torch.log1p(ratio_minus_one / 2)  # log((1 + r) / 2), exact near r = 1
    return {
        "gen_kl_error": ratio_minus_one - log_ratio,
        "policy_kl_error": ratio * log_ratio - ratio_minus_one,
        "js_divergence_error": (ratio * log_ratio - (1 + ratio) * mixture) / 2,
    }


def effective_sample_size(mean_weight: float, mean_squared_weight: float) -> float:
    """Share of the samples that importance-weighted averages amount to: (sum w)^2 / (n sum w^2) (Kish 1965).

    Args:
        mean_weight: mean of the importance weights over all samples.
        mean_squared_weight: mean of the squared importance weights over all samples.

    Returns:
        1 when all weights are equal, down to 1/n when one sample has all the weight; 0 without any weight.
    """
    return mean_weight**2 / mean_squared_weight if mean_squared_weight > 0 else 0.0


def inconsistent_sequences(
    loss_mask: Tensor, prev: Tensor, generation: Tensor, lengths: list[int], threshold: float
) -> tuple[Tensor, dict[str, float]]:
    """Find the responses whose mean token_mult_prob_error, exp(|prev - generation|), is too large.

    Args:
        loss_mask: [sum(lengths)], float32: 1 where the loss is taken, else 0.
        prev: [sum(lengths)], float32: log-probabilities as the training framework computes them.
        generation: [sum(lengths)], float32: log-probabilities under which the engine drew the tokens.
        lengths: tokens of each sequence.
        threshold: largest mean error of a response that stays in the loss.

    Returns:
        [sequences], bool: those beyond the threshold; and the metrics max_seq_mult_prob_error and num_masked_seqs.
    """
    errors = torch.where(loss_mask > 0, bounded_exp((prev - generation).abs()), torch.zeros_like(prev))
    sums = torch.stack([piece.sum() for piece in errors.split(lengths)])
    tokens = torch.stack([piece.sum() for piece in loss_mask.split(lengths)])
    means = sums / tokens.clamp(min=1)
    # "Not within" rather than "beyond": a mean that is NaN does not stay either.
    beyond = ~(means <= threshold) & (tokens > 0)
    return beyond, {"max_seq_mult_prob_error": float(means.max()), "num_masked_seqs": float(beyond.sum())}
