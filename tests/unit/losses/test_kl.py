"""The KL estimators against exact sums over a vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_grpo.losses.divergence import KLType, kl_estimate


def distributions() -> tuple[Tensor, Tensor]:
    """Logits of a policy, and the log-probabilities of a reference."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits, torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kl_type: KLType) -> None:
    logits, reference = distributions()
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, kl_type)).sum(), exact)


@pytest.mark.parametrize("kl_type", ["k2", "k3"])
def test_k2_and_k3_are_never_negative(kl_type: KLType) -> None:
    logits, reference = distributions()
    assert kl_estimate(logits.log_softmax(0), reference, kl_type).min() >= 0


def expected_gradient(kl_type: KLType) -> Tensor:
    """Of the estimate as a loss: the tokens are drawn, so their probabilities have no gradient."""
    logits, reference = distributions()
    policy = logits.log_softmax(0)
    (policy.exp().detach() * kl_estimate(policy, reference, kl_type)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_as_a_loss_k2_has_the_gradient_of_the_divergence_and_k1_has_none() -> None:
    logits, reference = distributions()
    policy = logits.log_softmax(0)
    (policy.exp() * (policy - reference)).sum().backward()
    torch.testing.assert_close(expected_gradient("k2"), logits.grad)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(50, dtype=torch.float64))


def test_as_a_loss_k3_has_the_gradient_of_the_reversed_divergence() -> None:
    logits, reference = distributions()
    policy = logits.log_softmax(0)
    (reference.exp() * (reference - policy)).sum().backward()
    torch.testing.assert_close(expected_gradient("k3"), logits.grad)


def test_clamps_bound_the_log_ratio_and_the_estimate() -> None:
    policy, reference = torch.tensor([-1.0, -60.0, 0.0]), torch.tensor([-1.5, 0.0, -60.0])
    estimate = kl_estimate(policy, reference, "k3", input_clamp=2.0, output_clamp=4.0)
    e = torch.tensor([-0.5, 2.0, -2.0])
    torch.testing.assert_close(estimate, (e.exp() - 1 - e).clamp(max=4.0))
    assert kl_estimate(policy, reference, "k1", output_clamp=0.25).tolist() == [0.25, -0.25, 0.25]
