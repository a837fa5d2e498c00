"""Replayed routing against plain arithmetic: experts, weights and gradients; and where records stand on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from megatron_grpo.trainer.model.experts import RoutingReplay
from megatron_grpo.trainer.model.packed_sequences import lay_out, select_routing, select_source

LENGTHS = [3, 5, 1]
EXPERTS, TOP_K = 6, 2
BIAS = torch.tensor([0.9, -0.3, 0.0, 0.4, -0.8, 0.2])
KINDS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax of all": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid", "scaling_factor": 1.5},
    "sigmoid, bias and groups": {
        "score_function": "sigmoid",
        "expert_bias": BIAS,
        "num_groups": 2,
        "group_topk": 1,
    },
}
RECORD = torch.tensor([[5, 0], [-1, -1], [1, 4], [2, 3]], dtype=torch.int8)


def logits() -> Tensor:
    """[4, EXPERTS], with gradient."""
    return torch.randn(4, EXPERTS, generator=torch.Generator().manual_seed(1), requires_grad=True)


def weights_of(given: Tensor, experts: Tensor, kind: dict[str, Any]) -> Tensor:
    """[tokens, EXPERTS]: what chosen experts, [tokens, TOP_K], weigh, by the formulas; a bias only chooses."""
    if kind.get("score_function") == "sigmoid":
        chosen = given.sigmoid().gather(1, experts)
        chosen = chosen / chosen.sum(dim=1, keepdim=True) * kind.get("scaling_factor", 1.0)
    elif kind.get("use_pre_softmax"):
        chosen = (given.exp() / given.exp().sum(dim=1, keepdim=True)).gather(1, experts)
    else:
        chosen = given.gather(1, experts).exp()
        chosen = chosen / chosen.sum(dim=1, keepdim=True)
    return torch.zeros_like(given).scatter(1, experts, chosen)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_recorded_experts_are_weighed_as_if_the_router_had_chosen_them(kind: dict[str, Any]) -> None:
    given = logits()
    _, own = topk_routing_with_score_function(given.detach(), TOP_K, **kind)
    experts = RECORD.long().clone()
    experts[1] = own[1].nonzero()[:, 0]  # nothing is on record: the router chooses
    replay = RoutingReplay(RECORD)
    weights, chosen = topk_routing_with_score_function(given, TOP_K, router_replay=replay, **kind)
    again = logits()
    expected = weights_of(again, experts, kind)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(chosen, torch.zeros(4, EXPERTS).scatter(1, experts, 1.0).bool())
    factors = torch.randn(4, EXPERTS, generator=torch.Generator().manual_seed(2))
    (weights * factors).sum().backward()
    (expected * factors).sum().backward()
    torch.testing.assert_close(given.grad, again.grad)
    assert replay.is_recorded.tolist() == [True, False, True, True]
    assert replay.agreed is not None
    for token in (0, 2, 3):
        mine = set(own[token].nonzero()[:, 0].tolist())
        assert replay.agreed[token] == len(mine & set(RECORD[token].tolist()))
    assert replay.agreed[1] == 0


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_routers_own_choice_on_record_changes_no_bit(kind: dict[str, Any]) -> None:
    class Recorder(RoutingReplay):
        """Notes what the router chooses, in its order."""

        def get_replay_topk(self, scores: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
            values, self.own = arguments[-1](scores, *arguments[:-1])
            return values, self.own

    given, again = logits(), logits()
    recorder = Recorder(RECORD)
    weights, chosen = topk_routing_with_score_function(given, TOP_K, router_replay=recorder, **kind)
    replay = RoutingReplay(recorder.own.to(torch.int16))
    replayed, rechosen = topk_routing_with_score_function(again, TOP_K, router_replay=replay, **kind)
    assert torch.equal(weights, replayed)
    assert torch.equal(chosen, rechosen)
    weights.square().sum().backward()
    replayed.square().sum().backward()
    assert torch.equal(given.grad, again.grad)
    assert replay.agreed is not None
    assert replay.agreed.tolist() == [TOP_K] * 4


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_every_token_finds_its_record_on_the_rank_that_holds_it(size: int, parts: int) -> None:
    total = sum(LENGTHS)
    routed = torch.arange(total * 4, dtype=torch.int16).view(total, 4)
    seen = []
    for rank in range(size):
        layout = lay_out(LENGTHS, rank=rank, size=size, tensor_multiple=4)
        sources = [select_source(layout, part=part, parts=parts) for part in range(parts)]
        held = [select_routing(routed.numpy(), source) for source in sources]
        assert [len(one) for one in held] == [layout.local_tokens // parts] * parts
        for row, source in zip(torch.cat(held).tolist(), layout.source.tolist(), strict=True):
            assert row == ([-1] * 4 if source < 0 else routed[source].tolist())
            seen.append(source)
        nothing = select_routing(routed.numpy(), select_source(layout, part=0, parts=parts, is_dummy=True))
        assert (nothing == -1).all()
        assert nothing.dtype == torch.int16
    assert sorted(source for source in seen if source >= 0) == list(range(total))
    assert -1 in seen, "padding"
