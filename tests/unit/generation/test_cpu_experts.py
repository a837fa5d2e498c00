"""Ranks that have some of the experts each add up to all of them."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.generation.cpu_worker import localize_choices


@pytest.mark.parametrize("placement", [[[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]], [[5, 0, 1, 2], [4, 3]]])
def test_the_outputs_of_all_ranks_add_up_to_those_of_all_experts(placement: list[list[int]]) -> None:
    torch.manual_seed(0)
    hidden, matrices = torch.randn(9, 4), torch.randn(6, 4, 4)
    weights, chosen = torch.rand(9, 6).topk(3, dim=1)
    expected = torch.einsum("th,tchk,tc->tk", hidden, matrices[chosen], weights)
    total = torch.zeros_like(expected)
    for experts in placement:
        place_here = torch.full((6,), -1, dtype=torch.int32)
        place_here[experts] = torch.arange(len(experts), dtype=torch.int32)
        weights_here, chosen_here = localize_choices(weights, chosen.to(torch.int32), place_here, len(experts))
        assert chosen_here.dtype == torch.int32
        total += torch.einsum("th,tchk,tc->tk", hidden, matrices[experts][chosen_here.long()], weights_here)
    torch.testing.assert_close(total, expected)
