"""Losses of a router against plain Python, and replayed routing."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.platform.device import Platform
from megatron_grpo.platform.megatron_on_cpu import apply_patches
from megatron_grpo.trainer.model.experts import ExpertRouter, sum_load_levels
from megatron_grpo.trainer.model.megatron_config import DecoderSettings
from megatron_grpo.trainer.model.packed_sequences import (
    Membership,
    build_membership,
    lay_out,
    select_routing,
    select_source,
)

LENGTHS = [3, 5, 1]


def test_padding_belongs_to_no_sequence() -> None:
    layout = lay_out(LENGTHS, tensor_multiple=4)
    membership = build_membership(layout, layout.source)
    assert membership.sequence.tolist() == [0] * 3 + [1] * 5 + [2] + [3] * (layout.local_tokens - 9)
    assert membership.weight.tolist() == pytest.approx(
        [1 / 3] * 3 + [1 / 5] * 5 + [1.0] + [0.0] * (layout.local_tokens - 9)
    )
    assert not build_membership(layout, select_source(layout, part=0, parts=1, is_dummy=True)).weight.any()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_sequences_hold_every_token_once(size: int) -> None:
    by_rank = [lay_out(LENGTHS, rank=rank, size=size, tensor_multiple=2) for rank in range(size)]
    layout_sources = [(layout, select_source(layout, part=part, parts=2)) for layout in by_rank for part in range(2)]
    memberships = [build_membership(layout, source) for layout, source in layout_sources]
    weights = np.zeros(len(LENGTHS))
    for membership in memberships:
        for sequence, weight in zip(membership.sequence.tolist(), membership.weight.tolist(), strict=True):
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


apply_patches()

EXPERTS, TOP_K = 6, 2
BIAS = torch.tensor([0.9, -0.3, 0.0, 0.4, -0.8, 0.2])
KINDS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax of all": {"moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 1.5},
    "sigmoid, bias and groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
    },
}
RECORD = torch.tensor([[5, 0], [-1, -1], [1, 4], [2, 3]], dtype=torch.int8)


def logits() -> Tensor:
    """[4, 1, EXPERTS], with gradient."""
    return torch.randn(4, 1, EXPERTS, generator=torch.Generator().manual_seed(1), requires_grad=True)


def make_router(kind: dict[str, Any], record: Tensor | None) -> ExpertRouter:
    """A router of one rank, with the fields of `kind`; record None: it does not replay."""
    settings = DecoderSettings(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        cuda_graph_modules=[],
        platform=Platform("cpu", torch.device("cpu"), "gloo"),
        **kind,
    )
    router = ExpertRouter(settings, SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None))
    if router.expert_bias is not None:
        router.expert_bias.copy_(BIAS)
    router.membership = Membership(torch.zeros(4, dtype=torch.int64), torch.full((4,), 0.25), 1)
    router.replayed_layer, router.record = None if record is None else 0, record
    return router


def own_choice(kind: dict[str, Any]) -> Tensor:
    """[4, TOP_K]: the experts that the router chooses."""
    _, chosen = make_router(kind, None).routing(logits().detach())
    return chosen.nonzero()[:, 1].view(4, TOP_K)


def weights_of(scores: Tensor, experts: Tensor, kind: dict[str, Any]) -> Tensor:
    """[tokens, EXPERTS]: what chosen experts, [tokens, TOP_K], weigh, by the formulas; a bias only chooses."""
    if kind.get("moe_router_score_function") == "sigmoid":
        chosen = scores.sigmoid().gather(1, experts)
        chosen = chosen / chosen.sum(dim=1, keepdim=True) * kind.get("moe_router_topk_scaling_factor", 1.0)
    elif kind.get("moe_router_pre_softmax"):
        chosen = (scores.exp() / scores.exp().sum(dim=1, keepdim=True)).gather(1, experts)
    else:
        chosen = scores.gather(1, experts).exp()
        chosen = chosen / chosen.sum(dim=1, keepdim=True)
    return torch.zeros_like(scores).scatter(1, experts, chosen)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_recorded_experts_are_weighed_as_if_the_router_had_chosen_them(kind: dict[str, Any]) -> None:
    scores, again, choice = logits(), logits(), own_choice(kind)
    experts = torch.where(RECORD.long() < 0, choice, RECORD.long())  # nothing is on record: the router chooses
    router = make_router(kind, RECORD)
    weights, chosen = router.routing(scores)
    expected = weights_of(again[:, 0], experts, kind)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(chosen, torch.zeros(4, EXPERTS).scatter(1, experts, 1.0).bool())
    factors = torch.randn(4, EXPERTS, generator=torch.Generator().manual_seed(2))
    (weights * factors).sum().backward()
    (expected * factors).sum().backward()
    torch.testing.assert_close(scores.grad, again.grad)
    agreed = sum(len(set(choice[token].tolist()) & set(RECORD[token].tolist())) for token in (0, 2, 3))
    assert router.agreement.tolist() == [agreed, 3 * TOP_K]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_routers_own_choice_on_record_changes_no_bit(kind: dict[str, Any]) -> None:
    scores, again = logits(), logits()
    plain, replaying = make_router(kind, None), make_router(kind, torch.full((4, TOP_K), -1))
    weights, chosen = plain.routing(scores)
    replayed, rechosen = replaying.routing(again)
    assert torch.equal(weights, replayed)
    assert torch.equal(chosen, rechosen)
    weights.square().sum().backward()
    replayed.square().sum().backward()
    assert torch.equal(scores.grad, again.grad)
    full = make_router(kind, own_choice(kind).to(torch.int16))
    full.routing(logits())
    assert full.agreement.tolist() == [4 * TOP_K] * 2


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_every_token_finds_its_record_on_the_rank_that_holds_it(size: int, parts: int) -> None:
    total = sum(LENGTHS)
    form = RoutedForm(layers=(0, 1), top_k=2, experts=100)
    experts = torch.arange(total * 4, dtype=torch.int16).view(total, 2, 2)
    rows = form.pack(experts.numpy())
    records = []
    for rank in range(size):
        layout = lay_out(LENGTHS, rank=rank, size=size, tensor_multiple=4)
        sources = [select_source(layout, part=part, parts=parts) for part in range(parts)]
        rows_by_rank = [select_routing(form, rows, source) for source in sources]
        assert [len(rank_rows) for rank_rows in rows_by_rank] == [layout.local_tokens // parts] * parts
        for row, source in zip(torch.cat(rows_by_rank).tolist(), layout.source.tolist(), strict=True):
            assert row == ([[-1, -1]] * 2 if source < 0 else experts[source].tolist())
            records.append(source)
        nothing = select_routing(form, rows, select_source(layout, part=0, parts=parts, is_dummy=True))
        assert (nothing == -1).all()
        assert nothing.dtype == torch.int16
    assert sorted(source for source in records if source >= 0) == list(range(total))
    assert -1 in records, "padding"
