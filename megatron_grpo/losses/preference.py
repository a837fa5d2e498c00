"""Losses of whole responses (DPO, KTO, reward models), and their gradients by sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_grpo.batch.token_batch import TokenFields, require_field
from megatron_grpo.config.loop_schema import DPOConfig, KTOConfig
from megatron_grpo.losses.loss import GlobalCounts, Segments, mask_values


class PreferenceLoss(NamedTuple):
    """The loss of some rows, with its derivatives."""

    loss: float
    gradient: Tensor
    """[rows, responses], float64: derivative by the response's log-probability (sum over its tokens) or score."""
    metrics: dict[str, float]
    rewards: Tensor | None = None
    """[pairs, 2], float64: reward of each response, whose difference is the margin; a reward model's scores."""


def compute_preference_loss(
    logprobs: Tensor, reference: Tensor, tokens: Tensor, weights: Tensor, config: DPOConfig
) -> PreferenceLoss:
    """Preference loss (DPO) with an optional likelihood of the chosen response.

    ::

        h     = (chosen - chosen under the reference) - (rejected - rejected under the reference)
        pair  = -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)         (sigmoid, Rafailov et al. 2023, eq. 7)
                (h - 1 / (2 beta))^2                                          (ipo, Azar et al. 2023, eq. 17)
                that of sigmoid at beta h - gamma in place of beta h          (simpo, Meng et al. 2024, eq. 6)
        loss  = mean of preference_loss_weight * pair - sft_loss_weight * chosen

    s is label_smoothing, gamma target_margin. In simpo h is the difference of means over tokens, without a reference.

    Args:
        logprobs: [pairs, 2], float64: of the chosen and the rejected response under the policy, summed over tokens.
        reference: [pairs, 2], float64: the log-probabilities of the same responses under the reference policy; simpo
            does not read it.
        tokens: [pairs, 2]: tokens of each response, for averages.
        weights: [pairs]: of each pair in the mean.
    """
    policy = logprobs.detach().clone().requires_grad_()
    is_simpo = config.loss_type == "simpo"
    scale = tokens.to(policy) if config.preference_average_log_probs or is_simpo else torch.ones_like(policy)
    # Rewards of the responses; with a reference up to a term of the prompt that their difference lacks.
    rewards = config.reference_policy_kl_penalty * (policy if is_simpo else policy - reference) / scale
    margin = rewards[:, 0] - rewards[:, 1]
    if config.loss_type == "ipo":
        pair = (margin / config.reference_policy_kl_penalty - 0.5 / config.reference_policy_kl_penalty).square()
    else:
        smoothing, surplus = config.label_smoothing, margin - (config.target_margin if is_simpo else 0.0)
        pair = -(1 - smoothing) * logsigmoid(surplus) - smoothing * logsigmoid(-surplus)
    chosen = policy[:, 0] / tokens[:, 0] if config.sft_average_log_probs else policy[:, 0]
    share = weights / weights.sum()
    preference, likelihood = (pair * share).sum(), -(chosen * share).sum()
    loss = config.preference_loss_weight * preference + config.sft_loss_weight * likelihood
    (gradient,) = torch.autograd.grad(loss, policy)
    rewards = rewards.detach()
    metrics = {
        "preference_loss": preference.item(),
        "sft_loss": likelihood.item(),
        "preference_accuracy": float((rewards[:, 0] > rewards[:, 1]).double() @ share),
        "margin": float(margin.detach() @ share),
        "rewards_chosen_mean": float(rewards[:, 0] @ share),
        "rewards_rejected_mean": float(rewards[:, 1] @ share),
    }
    return PreferenceLoss(loss.item(), gradient, metrics, rewards)


def compute_label_loss(
    logprobs: Tensor, reference: Tensor, labels: Tensor, weights: Tensor, reference_point: float, config: KTOConfig
) -> PreferenceLoss:
    """Loss of single responses that are desirable or not (KTO).

    ::

        r     = log-probability of the response - that under the reference
        loss  = mean of desirable_weight (1 - sigmoid(beta (r - z)))      for desirable responses
                        undesirable_weight (1 - sigmoid(beta (z - r)))    for others

    (Ethayarajh et al. 2024, eqs. 7 and 8).

    Args:
        logprobs: [rows, responses], float64: of the responses under the policy, summed over tokens.
        reference: [rows, responses], float64: the same under the reference policy.
        labels: [rows, responses], bool: True for desirable responses.
        weights: [rows]: of each row in the mean.
        reference_point: z, the divergence from the reference policy of responses to other prompts.
    """
    policy = logprobs.detach().clone().requires_grad_()
    rewards, beta = policy - reference, config.reference_policy_kl_penalty
    share = (weights / weights.sum() / policy.shape[1])[:, None].expand_as(policy)
    surplus = torch.where(labels, 1.0, -1.0).to(policy) * (rewards - reference_point)
    factors = labels.to(policy) * config.desirable_weight + (~labels).to(policy) * config.undesirable_weight
    loss = (factors * (1 - torch.sigmoid(beta * surplus)) * share).sum()
    (gradient,) = torch.autograd.grad(loss, policy)
    metrics = {
        "preference_accuracy": float(((surplus > 0) * share).sum()),
        "reference_point": reference_point,
        "desirable_share": float(share[labels].sum()),
    }
    for name, group in (("rewards_chosen_mean", labels), ("rewards_rejected_mean", ~labels)):
        if (total := share[group].sum()) > 0:  # a step may have responses of one kind only
            metrics[name] = float(beta * (rewards.detach() * share)[group].sum() / total)
    return PreferenceLoss(loss.item(), gradient, metrics, beta * rewards.detach())


def compute_score_loss(scores: Tensor, margins: Tensor, weights: Tensor, center: float) -> PreferenceLoss:
    """Loss of a reward model on pairs (Bradley and Terry 1952).

    ::

        loss = mean of -log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2

    (Ouyang et al. 2022, eq. 1).

    Args:
        scores: [pairs, 2], float64: of the chosen and the rejected response.
        margins: [pairs]: differences that the scores should exceed (Touvron et al. 2023, eq. 2).
        weights: [pairs]: of each pair in the mean.
        center: weight of the term that keeps scores near 0 (Eisenstein et al. 2023, eq. 2).
    """
    scores = scores.detach().clone().requires_grad_()
    margin, share = scores[:, 0] - scores[:, 1], weights / weights.sum()
    loss = ((center * scores.sum(dim=1).square() - logsigmoid(margin - margins)) * share).sum()
    (gradient,) = torch.autograd.grad(loss, scores)
    means, in_mean = share @ scores.detach(), scores.detach()[weights > 0]
    metrics = {
        "accuracy": float((margin > 0).double() @ share),
        "margin": float(margin.detach() @ share),
        "mean_reward": means.mean().item(),
        "min_reward": in_mean.min().item(),
        "max_reward": in_mean.max().item(),
        "rewards_chosen_mean": means[0].item(),
        "rewards_rejected_mean": means[1].item(),
    }
    return PreferenceLoss(loss.item(), gradient, metrics, scores.detach())


class SequenceGradientLossFn:
    """A loss with a known derivative by each sequence (a `losses.loss.LossFunction`).

    loss = sum of derivative * output (a log-probability or score) over the sampled tokens. A loss of whole sequences,
    such as that of pairs, has this gradient, and the sum over tokens can be split over any microbatches, replicas and
    context-parallel ranks. The field advantages has the negative derivative of the token's sequence. The value means
    nothing.
    """

    field_names = ("sampled",)

    def __call__(
        self, outputs: Tensor, tokens: TokenFields, counts: GlobalCounts, segments: Segments | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this microbatch's share of the gradient."""
        mask = require_field(tokens.loss_mask) > 0
        loss = -(mask_values(outputs, mask) * mask_values(require_field(tokens.advantages), mask)).sum()
        return loss, {"loss": loss}
