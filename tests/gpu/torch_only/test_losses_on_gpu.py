"""Losses on a GPU in float32, as a run computes them, against their definitions in Python floats on the CPU."""

import pytest
import torch

from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from tests.support.loss_oracle import CONFIGS, counts_of, loop_loss, random_batch
from tests.support.token_fields import mapped


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_are_the_definition(name: str, device: str) -> None:
    loss_fn = ClippedPGLossFn(CONFIGS[name])
    curr, tokens = random_batch(1)
    losses, gradients = [], []
    for where, dtype in ((device, torch.float32), ("cpu", torch.float64)):
        values = curr.to(where, dtype).requires_grad_()
        loss, _ = loss_fn(values, mapped(tokens, lambda entry, to=(where, dtype): entry.to(*to)), counts_of(tokens))
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, values)[0].cpu().double())
    assert losses == pytest.approx([loop_loss(curr, tokens, CONFIGS[name])] * 2, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
