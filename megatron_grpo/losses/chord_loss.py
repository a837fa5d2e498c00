"""CHORD's loss: GRPO's, mixed with the likelihood of demonstrated responses."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.losses.likelihood import imitation_loss
from megatron_grpo.losses.loss import GlobalCounts, Segments
from megatron_grpo.losses.policy_loss import ClippedPGLossFn


class ChordLossFn(ClippedPGLossFn):
    """(1 - mu) `ClippedPGLossFn` + mu `imitation_loss` (Zhang et al. 2025, arXiv 2508.11408).

    mu is `demonstration_weight`. Samples have the first term, demonstrations the second. Each is a mean over its own
    tokens, so that mu alone decides how much they count, not the number of rows.
    """

    demonstration_weight = 0.0  # mu of the present step, which the driver sets
    favours_uncertain = False

    def __init__(self, config: LossConfig, folders: tuple[str, ...] = ()) -> None:
        super().__init__(replace(config, environment_nll_weight=0.0), folders)

    def __call__(
        self, curr_logprobs: Tensor, tokens: TokenFields, counts: GlobalCounts, segments: Segments | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this microbatch's share of loss and metrics."""
        total, metrics = super().__call__(curr_logprobs, tokens, counts, segments)
        total = (1 - self.demonstration_weight) * total
        if tokens.imitated is not None:
            nll = imitation_loss(curr_logprobs, tokens, counts, favours_uncertain=self.favours_uncertain)
            total, metrics["demonstration_nll"] = total + self.demonstration_weight * nll, nll
        metrics["loss"] = total
        return total, metrics
