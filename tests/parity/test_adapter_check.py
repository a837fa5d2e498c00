"""Published weights against what adapted layers compute, on ranks: healthy layouts, and faults that are planted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest
from torch import Tensor

from megatron_grpo.config.schema import OptimizerConfig
from megatron_grpo.models import adapter_check
from megatron_grpo.models.adapter_check import AdapterCheck, check_adapters
from megatron_grpo.models.hf_weights import BoundEntry
from megatron_grpo.trainer.model.lora import AdaptedLinear
from megatron_grpo.trainer.rank import PolicyRank
from tests.parity.adapters import MATRICES, adapted_layers, make_lora_rank
from tests.parity.policy_training import train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel

Precision = Literal["float32", "bfloat16"]
PRECISIONS = ("float32", "bfloat16")
LEARNING_RATE = 1e-5
"""A common one: in bfloat16 the first step changes few elements of a merged weight."""
HEALTHY = {"after a step", "after two steps", "healthy at the end"}
GATE_AND_UP = "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight"
FIRST = "0.mlp.linear_fc1"
compute_term = AdaptedLinear.compute_term


def make_rank(layout: Layout, model: TinyModel, precision: Precision, **settings: Any) -> PolicyRank:
    settings = {"optimizer": OptimizerConfig(lr=LEARNING_RATE), **settings}
    return make_lora_rank(layout, model, precision=precision, **settings)


def check(rank: PolicyRank) -> AdapterCheck:
    return check_adapters(rank.gather_chunks(), rank.shape)


@contextmanager
def planted(kind: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(kind, name)
    setattr(kind, name, value)
    try:
        yield
    finally:
        setattr(kind, name, original)


def merge_product(layer: AdaptedLinear, factor: float) -> Tensor:
    """The weight with the adapter's product times a factor."""
    return (layer.weight.float() + factor * (layer.lora_b.float() @ layer.lora_a.float())).to(layer.weight.dtype)


Merge = Callable[[AdaptedLinear], Tensor]


def merges(rank: PolicyRank, stale: dict[str, Tensor]) -> dict[str, Merge]:
    """Wrong merged weights of a layer, by the fault."""
    names = {id(layer): name for name, layer in adapted_layers(rank).items()}
    return {
        "left out": lambda layer: layer.weight.detach(),
        "twice": lambda layer: merge_product(layer, 2 * layer.scale),
        "scale missing": lambda layer: merge_product(layer, 1.0),
        "previous version": lambda layer: stale[names[id(layer)]],
        "first layer alone": lambda layer: merge_product(layer, layer.scale if names[id(layer)] == FIRST else 0.0),
    }


def faults_on_rank(layout: Layout, model: TinyModel, precision: Precision) -> dict[str, list[str]]:
    """The layers that the check names for each fault; of healthy ranks before and after steps."""
    rank = make_rank(layout, model, precision)
    assert check(rank) == AdapterCheck([], has_moved=False)
    texts_by_fault: dict[str, list[str]] = {}
    rank.train(*train_arguments(layout))
    texts_by_fault["after a step"] = check(rank).faults
    with planted(BoundEntry, "compute_weight", lambda bound: bound.parameter.detach()):
        texts_by_fault["the weight without its adapter"] = check(rank).faults
    original = adapter_check.bind_entries
    with planted(
        adapter_check, "bind_entries", lambda *args: [replace(bound, adapted=None) for bound in original(*args)]
    ):
        texts_by_fault["no layer counts as adapted"] = check(rank).faults
    stale = {name: layer.merge_weight() for name, layer in adapted_layers(rank).items()}
    rank.train(*train_arguments(layout))
    texts_by_fault["after two steps"] = check(rank).faults
    for fault, merge in merges(rank, stale).items():
        with planted(AdaptedLinear, "merge_weight", merge):
            texts_by_fault[fault] = check(rank).faults
    with planted(AdaptedLinear, "adapter_on", False):
        texts_by_fault["the layer computes without it"] = check(rank).faults
    with planted(AdaptedLinear, "compute_term", lambda *args: 2 * compute_term(*args)):
        texts_by_fault["the layer adds it twice"] = check(rank).faults
    texts_by_fault["healthy at the end"] = check(rank).faults
    assert check(rank).has_moved
    return texts_by_fault


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2, sequence=True), *rare([Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(tensor=4)])],
    ids=str,
)
def test_every_fault_is_found_and_nothing_else(
    layout: Layout, precision: Precision, tiny_models: dict[str, TinyModel]
) -> None:
    by_rank = run_on_ranks(layout, faults_on_rank, tiny_models["qwen3_tied"], precision)
    layers = {
        ", ".join(f"model.layers.{layer}.{matrix}.weight" for matrix in matrices)
        for layer in range(tiny_models["qwen3_tied"].shape.layers)
        for matrices in MATRICES.values()
    }
    for fault in by_rank[0]:
        texts = {text for faults in by_rank for text in faults[fault]}
        named = {text.partition(": ")[0] for text in texts}
        spared = {"first layer alone": {GATE_AND_UP}}.get(fault, layers if fault in HEALTHY else set())
        assert named == layers - spared, fault
        if fault in ("left out", "the weight without its adapter", "no layer counts as adapted"):
            assert all(text.endswith("published without the layer's adapter") for text in texts)
