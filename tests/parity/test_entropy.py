"""Entropy with the vocabulary split over tensor-parallel ranks, values and gradients."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.policy.logprobs import token_entropy, vocab_shard
from tests.parity.ranks import Layout, run_on_ranks

VOCAB, PADDED, TEMPERATURE = 11, 16, 0.7


def problem() -> tuple[Tensor, Tensor]:
    """Logits [2, 5, PADDED], with one rank's part far above the other's, and weights [2, 5]."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 5, PADDED, generator=generator) * 2
    logits[0, 1, : PADDED // 2] += 30
    return logits, torch.randn(2, 5, generator=generator)


def entropy_on_rank(layout: Layout) -> tuple[Tensor, Tensor]:
    """The entropies, and the gradient for this rank's columns."""
    group = parallel_state.get_tensor_model_parallel_group()
    logits, weights = problem()
    local = logits.chunk(group.size(), dim=-1)[group.rank()].clone().requires_grad_()
    entropy = token_entropy(local, vocab_shard(VOCAB, local.shape[-1], group), temperature=TEMPERATURE, chunk_tokens=3)
    (entropy * weights).sum().backward()
    assert local.grad is not None
    return entropy.detach(), local.grad


def test_entropy_equals_that_of_the_whole_vocabulary() -> None:
    logits, weights = problem()
    logits.requires_grad_()
    expected = torch.distributions.Categorical(logits=logits[:, :-1, :VOCAB] / TEMPERATURE).entropy()
    (expected * weights[:, 1:]).sum().backward()
    by_rank = run_on_ranks(Layout(tensor=2), entropy_on_rank)
    for entropy, _ in by_rank:
        torch.testing.assert_close(entropy[:, 1:], expected)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in by_rank], dim=-1), logits.grad)
