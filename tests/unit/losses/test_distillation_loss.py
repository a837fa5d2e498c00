"""The loss of distillation: an average of divergences, alone or beside the policy-gradient loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.distillation_loss import DistillationLossFn
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.losses.policy_loss import ClippedPGLossFn

MASK = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
COUNTS = GlobalCounts(tokens=3.0, sequences=2.0, all_sequences=2.0)


def make_tokens() -> tuple[torch.Tensor, TokenFields]:
    generator = torch.Generator().manual_seed(1)
    curr, generation, advantages, divergence = torch.randn(4, 2, 3, generator=generator)
    divergence[MASK == 0] = torch.inf  # ignored, whatever it is
    tokens = TokenFields(
        token_ids=torch.zeros(2, 3, dtype=torch.int64),
        loss_mask=MASK,
        generation_logprobs=generation,
        advantages=advantages,
        divergence=divergence.requires_grad_(),
    )
    return curr.requires_grad_(), tokens


def test_alone_it_is_the_mean_divergence_without_advantages() -> None:
    curr, tokens = make_tokens()
    # Terms that belong to GRPO's loss are off, too.
    loss_fn = DistillationLossFn(LossConfig(entropy_coef=0.1, positive_example_nll_weight=0.2))
    loss, metrics = loss_fn(curr, replace(tokens, advantages=None), COUNTS)
    loss.backward()
    expected = tokens.divergence[MASK > 0].mean()
    assert float(loss) == pytest.approx(float(expected))
    assert float(metrics["teacher_divergence"]) == pytest.approx(float(expected))
    assert torch.equal(tokens.divergence.grad, MASK / 3)
    assert curr.grad is None, "the log-probabilities of the sampled tokens are only reported"


def test_sequences_may_weigh_the_same() -> None:
    curr, tokens = make_tokens()
    loss, _ = DistillationLossFn(LossConfig(token_level_loss=False))(curr, tokens, COUNTS)
    expected = (tokens.divergence[0, 1:].mean() + tokens.divergence[1, 1]) / 2
    assert float(loss) == pytest.approx(float(expected))


@pytest.mark.parametrize("token_level", [False, True])
def test_sequences_have_weights_and_shares_of_their_rollouts(token_level: bool) -> None:
    """Two segments of one rollout, of weight 1/4: two thirds of its tokens are in the first."""
    curr, tokens = make_tokens()
    weight, share = MASK * 0.25, MASK * torch.tensor([[2 / 3], [1 / 3]])
    tokens = replace(tokens, weight=weight, rollout_share=share)
    counts = GlobalCounts(tokens=3.0, sequences=0.25, all_sequences=0.25, token_weight=0.25)
    loss, _ = DistillationLossFn(LossConfig(token_level_loss=token_level))(curr, tokens, counts)
    assert float(loss) == pytest.approx(float(tokens.divergence[MASK > 0].mean())), "one rollout: its mean"
    heavier = replace(tokens, weight=MASK * torch.tensor([[0.5], [0.0]]))
    loss, _ = DistillationLossFn(LossConfig(token_level_loss=True))(curr, heavier, replace(counts, token_weight=1 / 3))
    assert float(loss) == pytest.approx(float(tokens.divergence[0, 1:].mean())), "a weight of 0 leaves it out"


def test_beside_rewards_it_adds_the_weighted_loss_of_grpo() -> None:
    config = LossConfig(policy_loss_weight=0.25, reference_policy_kl_penalty=0.0)
    curr, tokens = make_tokens()
    loss, metrics = DistillationLossFn(config)(curr, tokens, COUNTS)
    policy_loss, _ = ClippedPGLossFn(config)(curr, tokens, COUNTS)
    assert float(loss) == pytest.approx(float(tokens.divergence[MASK > 0].mean() + 0.25 * policy_loss))
    assert float(metrics["policy_loss"]) == pytest.approx(float(policy_loss))
    (gradient,) = torch.autograd.grad(loss, curr, retain_graph=True)
    (expected,) = torch.autograd.grad(0.25 * policy_loss, curr)
    torch.testing.assert_close(gradient, expected)
