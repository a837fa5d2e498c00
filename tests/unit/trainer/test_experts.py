"""The losses of a router against plain Python, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_grpo.trainer.model.experts import sum_load_levels
from megatron_grpo.trainer.model.packed_sequences import build_membership, lay_out, select_source

LENGTHS = [3, 5, 1]


def test_padding_belongs_to_no_sequence() -> None:
    layout = lay_out(LENGTHS, tensor_multiple=4)
    found = build_membership(layout, layout.source)
    assert found.sequence.tolist() == [0] * 3 + [1] * 5 + [2] + [3] * (layout.local_tokens - 9)
    assert found.weight.tolist() == pytest.approx([1 / 3] * 3 + [1 / 5] * 5 + [1.0] + [0.0] * (layout.local_tokens - 9))
    assert not build_membership(layout, select_source(layout, part=0, parts=1, is_dummy=True)).weight.any()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_sequences_hold_every_token_once(size: int) -> None:
    by_rank = [lay_out(LENGTHS, rank=rank, size=size, tensor_multiple=2) for rank in range(size)]
    held = [(one, select_source(one, part=part, parts=2)) for one in by_rank for part in range(2)]
    parts = [build_membership(one, source) for one, source in held]
    weights = np.zeros(len(LENGTHS))
    for one in parts:
        for sequence, weight in zip(one.sequence.tolist(), one.weight.tolist(), strict=True):
            if weight:
                weights[sequence] += weight
    assert weights == pytest.approx(np.ones(len(LENGTHS)))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_level_of_experts_is_that_of_each_sequence(score: str) -> None:
    experts, top_k = 5, 2
    logits = torch.randn(9 + 3, experts, generator=torch.Generator().manual_seed(0))
    layout = lay_out(LENGTHS, tensor_multiple=12)
    members = build_membership(layout, layout.source)
    level = sum_load_levels(logits, members, top_k=top_k, sigmoid=score == "sigmoid", sum_parts=lambda shares: shares)
    expected, start = 0.0, 0
    for length in LENGTHS:
        chosen, means = [0.0] * experts, [0.0] * experts
        for row in logits[start : start + length].tolist():
            scores = [math.exp(x) if score == "softmax" else 1 / (1 + math.exp(-x)) for x in row]
            scores = [x / sum(scores) for x in scores]
            for expert in sorted(range(experts), key=lambda e: -scores[e])[:top_k]:
                chosen[expert] += experts / (top_k * length)
            means = [mean + x / length for mean, x in zip(means, scores, strict=True)]
        expected += sum(f * p for f, p in zip(chosen, means, strict=True))
        start += length
    assert float(level) == pytest.approx(expected, rel=1e-5)
