"""The loss of on-policy distillation: the divergence from a teacher, alone or beside the policy-gradient loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields, require_field
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.losses.loss import GlobalCounts, Segments, loss_share, mask_values, token_mean, token_weights
from megatron_grpo.losses.policy_loss import ClippedPGLossFn


class DistillationLossFn(ClippedPGLossFn):
    """Mean divergence from the teacher plus policy_loss_weight times `ClippedPGLossFn`.

    Both terms have one average (`loss.loss_share`). The divergence of a token is that of whole next-token distributions
    (`megatron_grpo_kernels.divergence`), so its gradient is exact at the sampled prefix; the choice of the prefix
    itself has none (Agarwal et al. 2024, section 3). The divergence has no importance weight, since a prefix that an
    older policy sampled is as good a prefix as any. With policy_loss_weight=0 advantages and rewards are not needed.
    """

    field_names = (*ClippedPGLossFn.field_names, "teacher_outputs")

    def __init__(self, config: LossConfig, folders: tuple[str, ...] = ()) -> None:
        self.weight = config.policy_loss_weight
        config = replace(config, environment_nll_weight=0.0)
        if not self.weight:  # terms of the other loss that need fields of their own
            config = replace(config, reference_policy_kl_penalty=0.0, entropy_coef=0.0, positive_example_nll_weight=0.0)
            config = replace(config, objective="clipped", objective_options={}, corrections=[])
        super().__init__(config, folders)

    def __call__(
        self, curr_logprobs: Tensor, tokens: TokenFields, counts: GlobalCounts, segments: Segments | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this microbatch's share of loss and metrics; tokens also have `divergence`."""
        mask = require_field(tokens.loss_mask) > 0
        if not self.weight:
            tokens = replace(tokens, advantages=torch.zeros_like(curr_logprobs))
        policy_loss, metrics = super().__call__(curr_logprobs, tokens, counts, segments)
        divergence = mask_values(require_field(tokens.divergence), mask)
        weight = token_weights(tokens, mask)
        share = 1.0 if tokens.rollout_share is None else mask_values(tokens.rollout_share, mask)
        total = loss_share(divergence, mask, counts, self.config, segments, weight, share)
        if self.weight:
            total = total + self.weight * policy_loss
            metrics["policy_loss"] = policy_loss
        metrics["teacher_divergence"] = token_mean(divergence, mask, counts)
        metrics["loss"] = total
        return total, metrics
