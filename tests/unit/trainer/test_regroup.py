"""Copies into rectangles and back have the values and gradients of plain indexing."""

from __future__ import annotations

import torch

from megatron_grpo.trainer.model.attention import IntoSlots, OutOfSlots
from megatron_grpo.trainer.model.packed_sequences import attention_calls, lay_out

LENGTHS = [3, 9, 1, 8, 7, 2, 9, 30]
"""Of sequences that make several rectangles, some with slots that repeat a token."""


def test_values_and_gradients_are_those_of_indexing() -> None:
    draw = torch.Generator().manual_seed(0)
    calls = attention_calls(lay_out(LENGTHS))
    assert calls.slots is not None
    assert calls.out is not None
    assert len(calls.slots) > sum(LENGTHS), "some slots repeat a token"
    tokens = torch.randn(sum(LENGTHS), 2, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(calls.slots), 2, 5, generator=draw, dtype=torch.float64)
    ahead = torch.randn(sum(LENGTHS), 2, 5, generator=draw, dtype=torch.float64)
    ours = OutOfSlots.apply(IntoSlots.apply(tokens, calls.slots, calls.out) * weights, calls.out)
    plain = (tokens[calls.slots] * weights)[calls.out]
    assert torch.equal(ours, plain)
    assert torch.equal(ours, tokens * weights[calls.out]), "every token comes back to its place"
    gradients = [torch.autograd.grad(one, tokens, ahead)[0] for one in (ours, plain)]
    assert torch.equal(*gradients)


def test_sequences_of_one_length_stay_where_they_are() -> None:
    calls = attention_calls(lay_out([6, 6, 6]))
    assert (calls.slots, calls.out, calls.own_keys) == (None, None, True)
    assert not attention_calls(lay_out([6, 6, 6]), window=4).own_keys
    assert not attention_calls(lay_out([8, 8], rank=1, size=2)).own_keys
