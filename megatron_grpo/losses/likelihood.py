"""Likelihoods of tokens that others wrote: supervised fine-tuning, and terms beside the policy-gradient loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields, require_field
from megatron_grpo.losses.loss import GlobalCounts, Segments, mask_values, token_weights, weighted_mean


def imitation_loss(
    logprobs: Tensor, tokens: TokenFields, counts: GlobalCounts, *, favours_uncertain: bool = False
) -> Tensor:
    """This microbatch's share of the mean of -log-probability over imitated tokens, shape [].

    The mean is over all such tokens of the step, each with the weight of its sequence; a step may have none. With
    `favours_uncertain` each counts with p (1 - p) besides, where p is its probability, without gradient: least where
    the policy is certain, or finds the token impossible (CHORD-phi, Zhang et al. 2025, arXiv 2508.11408).
    """
    factors = require_field(tokens.imitated)
    # Others need not write what a sampling filter keeps.
    logprobs = mask_values(logprobs if tokens.unfiltered_logprobs is None else tokens.unfiltered_logprobs, factors > 0)
    if favours_uncertain:
        probabilities = logprobs.detach().exp()
        factors = factors * probabilities * (1 - probabilities)
    return -torch.sum(logprobs * factors) / (counts.imitated_tokens or 1.0)


class NLLLossFn:
    """Negative log-likelihood (a `losses.loss.LossFunction`).

    loss = mean of -log-probability over the tokens in the loss of the step, each with the weight of its sequence.
    """

    field_names = ("sampled",)

    def __call__(
        self, curr_logprobs: Tensor, tokens: TokenFields, counts: GlobalCounts, segments: Segments | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this microbatch's share of the loss."""
        mask = require_field(tokens.loss_mask) > 0
        loss = weighted_mean(-mask_values(curr_logprobs, mask), mask, counts, token_weights(tokens, mask))
        return loss, {"loss": loss}
