"""Layouts that a model does not split into, and what the message says instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.shape import DeltaShape, ExpertShape, IndexerShape, LatentShape, ModelShape
from megatron_grpo.preflight.layout_checks import check_engines, check_split

DENSE = ModelShape(
    family="qwen3",
    layers=12,
    hidden=64,
    ffn_hidden=96,
    attention_heads=8,
    key_value_heads=4,
    head_dim=8,
    vocab=101,
    tied_embeddings=True,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_positions=128,
    qkv_bias=False,
    qk_norm=True,
)
EXPERTS = replace(DENSE, experts=ExpertShape(count=6, ffn_hidden=10, top_k=2, layers=(True,) * 12))
DELTA = replace(
    DENSE,
    output_gate=True,
    delta=DeltaShape(key_heads=6, value_heads=12, key_dim=8, value_dim=8, kernel=4),
    delta_layers=(True, False) * 6,
)
LATENT = replace(
    DENSE,
    latent=LatentShape(query_rank=None, rank=16, plain_dim=8, rope_dim=4, value_dim=8),
)
# Of twelve layers the third to fifth, eighth, ninth and last share the choice of the layer before.
SPARSE = replace(
    LATENT,
    indexer=IndexerShape(
        heads=2, head_dim=8, top_k=4, layers=tuple(letter == "F" for letter in "FFSSSFFSSFFS"), interleaved_rope=True
    ),
)


def problems(shape: ModelShape, **layout: Any) -> dict[str, str]:
    return {
        subject: text
        for is_broken, subject, text in check_split("policy.parallel", ParallelConfig(**layout), shape)
        if is_broken
    }


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (DENSE, {"tensor": 8}),  # two ranks to a key/value head
        (DENSE, {"pipeline": 2, "virtual_pipeline": 3}),
        (DENSE, {"pipeline": 3, "first_stage_layers": 2}),
        (DENSE, {"pipeline": 3, "first_stage_layers": 2, "last_stage_layers": 4}),
        (DENSE, {"pipeline": 2, "count_embedding": True, "count_loss": True}),
        (EXPERTS, {"expert": 3, "data": 3}),
        (EXPERTS, {"expert": 2, "expert_tensor": 2, "tensor": 2, "sequence": True, "context": 2}),
        (LATENT, {"tensor": 2, "sequence": True}),
        (SPARSE, {"pipeline": 2}),
        (SPARSE, {"pipeline": 3, "first_stage_layers": 5, "last_stage_layers": 2}),
        (SPARSE, {"pipeline": 2, "first_stage_layers": 9}),
        (DELTA, {"tensor": 2, "context": 3}),
    ],
)
def test_what_fits(shape: ModelShape, layout: dict[str, Any]) -> None:
    assert problems(shape, **layout) == {}


@pytest.mark.parametrize(
    ("shape", "layout", "subject", "text"),
    [
        (DENSE, {"tensor": 16}, "tensor=16", "does not divide the model's 8 attention heads; use 1, 2, 4 or 8"),
        (replace(DENSE, ffn_hidden=90), {"tensor": 4}, "tensor=4", "90 feed-forward width; use 1 or 2"),
        (
            replace(DENSE, attention_heads=12, key_value_heads=3),
            {"tensor": 4},
            "tensor=4",
            "3 key/value heads, nor is it",
        ),
        (
            replace(DENSE, key_value_heads=1, head_dim=1),
            {"tensor": 8},
            "tensor=8",
            "10 rows of a key/value head, which 8",
        ),
        (DENSE, {"pipeline": 5}, "pipeline=5", "12 layers; use 1, 2, 3, 4, 6 or 12, or first_stage_layers"),
        (DENSE, {"pipeline": 2, "count_loss": True}, "pipeline=2", "and 1 that are counted too; use 1 or 13"),
        (
            DENSE,
            {"pipeline": 3, "first_stage_layers": 3},
            "pipeline=3",
            "9 of 12 layers remain",
        ),
        (DENSE, {"first_stage_layers": 3}, "first_stage_layers=3", "needs policy.parallel.pipeline > 1"),
        (
            DENSE,
            {"pipeline": 2, "last_stage_layers": 3, "count_loss": True},
            "last_stage_layers=3",
            "both shift layers between stages; use one of the two ways",
        ),
        (DENSE, {"count_loss": True}, "count_loss=True", "needs policy.parallel.pipeline > 1"),
        (DENSE, {"virtual_pipeline": 2}, "virtual_pipeline=2", "needs policy.parallel.pipeline > 1"),
        (
            DENSE,
            {"pipeline": 2, "virtual_pipeline": 4},
            "virtual_pipeline=4",
            "the 6 layers of a pipeline rank",
        ),
        (DENSE, {"expert": 2, "data": 2}, "expert=2", "the model has no experts; use 1"),
        (DENSE, {"expert_tensor": 2, "data": 2}, "expert_tensor=2", "the model has no experts; use 1"),
        (EXPERTS, {"expert": 4, "data": 4}, "expert=4", "does not divide the model's 6 experts; use 1, 2, 3 or 6"),
        (EXPERTS, {"expert_tensor": 4, "data": 4}, "expert_tensor=4", "an expert's width of 10; use 1, 2, 5 or 10"),
        (EXPERTS, {"expert": 2}, "expert=2", "tensor * context * data = 1; use 1, or more replicas"),
        (
            EXPERTS,
            {"tensor": 2},
            "sequence=False",
            "a mixture of experts with policy.parallel.tensor=2",
        ),
        (DELTA, {"tensor": 4}, "tensor=4", "does not divide the model's 6 key heads of delta nets; use 1 or 2"),
        (
            DELTA,
            {"context": 4},
            "context=4",
            "times tensor=1 does not divide the 6 key heads of the model's delta nets",
        ),
        (DELTA, {"tensor": 2, "context": 2}, "context=2", "which these ranks share; use 1 or 3"),
        (
            replace(DELTA, key_value_heads=1),
            {"tensor": 2},
            "tensor=2",
            "1 key/value heads, whose queries have gates that ranks cannot share; use 1",
        ),
        (LATENT, {"tensor": 2}, "sequence=False", "latent attention with policy.parallel.tensor=2 needs it; use true"),
        (SPARSE, {"pipeline": 3}, "pipeline=3", "begins a part with layer 4, which has no indexer"),
        (SPARSE, {"pipeline": 4}, "pipeline=4", "begins a part with layer 3, which has no indexer"),
        (SPARSE, {"pipeline": 2, "first_stage_layers": 8}, "pipeline=2", "begins a part with layer 8"),
        (SPARSE, {"pipeline": 2, "virtual_pipeline": 2}, "virtual_pipeline=2", "begins a part with layer 3"),
    ],
)
def test_what_does_not_fit_is_told_with_what_does(
    shape: ModelShape, layout: dict[str, Any], subject: str, text: str
) -> None:
    split_problems = problems(shape, **layout)
    assert text in split_problems[f"policy.parallel.{subject}"]


def test_a_layout_that_delta_nets_exclude_is_told_once() -> None:
    for layout in ({"tensor": 4}, {"context": 4}, {"tensor": 2, "context": 2}, {"tensor": 4, "context": 4}):
        assert len(problems(DELTA, **layout)) == 1


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_dense_width_that_no_layer_has_is_split_by_nobody(tensor: int) -> None:
    """Qwen3's and other mixtures state one whether or not a layer is dense."""
    wider = replace(EXPERTS, ffn_hidden=97)
    layout = {"tensor": tensor, "sequence": True, "expert": 2}
    assert problems(wider, **layout) == problems(EXPERTS, **layout)
    assert not [problem for problem in check_engines_of(wider, tensor) if "feed-forward width" in problem]
    assert wider.experts is not None
    mixed = replace(wider, experts=replace(wider.experts, layers=(False,) + (True,) * 11))
    for texts in (problems(mixed, **layout).values(), check_engines_of(mixed, tensor)):
        assert any("does not divide the model's 97 feed-forward width" in text for text in texts)


def check_engines_of(shape: ModelShape, tensor: int) -> list[str]:
    config = Config()
    config.generation.parallel.tensor = tensor
    return [text for is_broken, _, text in check_engines(config, shape) if is_broken]
