"""The gradient of pairs by sequence against autograd through all tokens, and the derivatives' signs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.schema import DPOConfig
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.losses.preference import SequenceGradientLossFn, compute_preference_loss, compute_score_loss

CASES = {
    "sigmoid": DPOConfig(reference_policy_kl_penalty=0.2),
    "smoothed": DPOConfig(reference_policy_kl_penalty=0.2, label_smoothing=0.2, preference_loss_weight=0.7),
    "averages": DPOConfig(
        preference_average_log_probs=True,
        sft_loss_weight=0.3,
        sft_average_log_probs=True,
        reference_policy_kl_penalty=2,
    ),
    "ipo": DPOConfig(loss_type="ipo", preference_average_log_probs=True, sft_loss_weight=0.1),
}
PAIRS, LENGTH = 3, 7


def oracle(logprobs: Tensor, reference: Tensor, mask: Tensor, weights: Tensor, config: DPOConfig) -> Tensor:
    """The definition, sequence by sequence: rows 2 n are chosen responses, rows 2 n + 1 rejected ones."""
    total = torch.zeros((), dtype=torch.float64)
    beta = config.reference_policy_kl_penalty
    for pair in range(PAIRS):
        gains, likelihood = [], torch.zeros(())
        for row in (2 * pair, 2 * pair + 1):
            gain = ((logprobs[row] - reference[row]) * mask[row]).sum()
            gains.append(gain / mask[row].sum() if config.preference_average_log_probs else gain)
        chosen = (logprobs[2 * pair] * mask[2 * pair]).sum()
        likelihood = -chosen / mask[2 * pair].sum() if config.sft_average_log_probs else -chosen
        h = gains[0] - gains[1]
        loss = (h - 1 / (2 * beta)) ** 2
        if config.loss_type == "sigmoid":
            s = config.label_smoothing
            loss = -logsigmoid(beta * h) * (1 - s) - logsigmoid(-beta * h) * s
        total = total + weights[pair] * (config.preference_loss_weight * loss + config.sft_loss_weight * likelihood)
    return total / weights.sum()


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_the_gradient_by_sequence_is_that_of_the_loss(config: DPOConfig) -> None:
    generator = torch.Generator().manual_seed(5)
    shape = (2 * PAIRS, LENGTH)
    logprobs = -torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_()
    reference = -torch.rand(shape, generator=generator, dtype=torch.float64)
    mask = (torch.rand(shape, generator=generator) < 0.6).double()
    mask[:, 1] = 1
    weights = torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)
    expected = oracle(logprobs, reference, mask, weights, config)
    (gradient,) = torch.autograd.grad(expected, logprobs)
    sums = [(values.detach() * mask).sum(1).view(-1, 2) for values in (logprobs, reference)]
    result = compute_preference_loss(*sums, mask.sum(1).view(-1, 2), weights, config)
    assert result.loss == pytest.approx(expected.item())
    fields = TokenFields(loss_mask=mask, advantages=-result.gradient.flatten()[:, None].expand(shape))
    loss, _ = SequenceGradientLossFn()(logprobs, fields, GlobalCounts(tokens=1, sequences=1, all_sequences=1))
    (actual,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(actual, gradient)


def test_scores_have_the_loss_of_bradley_and_terry() -> None:
    """Against the probability that the chosen response wins, and finite differences."""
    scores = torch.tensor([[0.3, -0.2], [1.0, 1.5], [-0.4, -0.5]], dtype=torch.float64)
    margins, weights = torch.tensor([0.0, 0.25, 1.0]).double(), torch.tensor([1.0, 0.5, 0.0]).double()

    def define(values: Tensor) -> float:
        strength = values.exp()
        chosen = strength[:, 0] / (strength[:, 0] + strength[:, 1] * margins.exp())
        return float(((-chosen.log() + 0.1 * values.sum(1) ** 2) * weights).sum() / weights.sum())

    result = compute_score_loss(scores, margins, weights, 0.1)
    assert result.loss == pytest.approx(define(scores), rel=1e-12)
    for index in range(scores.numel()):
        step = torch.zeros(scores.numel(), dtype=torch.float64).index_fill_(0, torch.tensor(index), 1e-6).view(-1, 2)
        slope = (define(scores + step) - define(scores - step)) / 2e-6
        assert result.gradient.flatten()[index].item() == pytest.approx(slope, abs=1e-8)
    assert result.metrics == pytest.approx(
        {
            "accuracy": 2 / 3,
            "margin": (0.5 + 0.5 * -0.5) / 1.5,
            "mean_reward": (0.1 + 0.5 * 2.5) / 3,
            "min_reward": -0.2,
            "max_reward": 1.5,
            "rewards_chosen_mean": (0.3 + 0.5 * 1.0) / 1.5,
            "rewards_rejected_mean": (-0.2 + 0.5 * 1.5) / 1.5,
        }
    )
