"""The loss of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields, require_field
from megatron_grpo.losses.loss import GlobalCounts, Segments, mask_values, token_weights, weighted_mean


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
