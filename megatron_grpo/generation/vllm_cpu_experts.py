"""Expert parallelism in vLLM's CPU engine, whose kernel takes every expert for one of its own rank."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor


def choices_here(weights: Tensor, chosen: Tensor, place_here: Tensor, experts_here: int) -> tuple[Tensor, Tensor]:
    """What tokens chose, for a rank that has some of the experts only.

    A choice of an expert elsewhere becomes one of an expert here with weight 0, spread so that none gets them all.

    Args:
        weights: [tokens, choices], float32, what the output of each chosen expert is multiplied by.
        chosen: [tokens, choices], int32, numbers of experts among all.
        place_here: [all experts], int32, number of each expert among those of this rank; -1: it is elsewhere.
        experts_here: experts of this rank.

    Returns:
        Both [tokens, choices]: weights, float32, and numbers among the experts of this rank, int32. The outputs of all
        ranks add up to those of all experts.
    """
    place = place_here[chosen.long()]
    elsewhere = place < 0
    return weights.masked_fill(elsewhere, 0.0), torch.where(elsewhere, chosen % experts_here, place).to(torch.int32)


def give_ranks_their_experts() -> None:
    """Let vLLM's CPU layers look at which experts a rank has: its kernel indexes those with the numbers of all of them.

    To be called once in each worker that shares experts, before the model is made.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    original = CPUUnquantizedExperts.apply

    @wraps(original)
    def apply(self: Any, *, w1: Tensor, expert_map: Tensor | None, **others: Any) -> None:
        assert expert_map is not None, "without expert parallelism nothing is to be replaced"
        assert not others["apply_router_weight_on_input"], "a weight of 0 must reach the output"
        weights, chosen = choices_here(others.pop("topk_weights"), others.pop("topk_ids"), expert_map, len(w1))
        original(self, w1=w1, expert_map=None, topk_weights=weights, topk_ids=chosen, **others)

    CPUUnquantizedExperts.apply = apply
