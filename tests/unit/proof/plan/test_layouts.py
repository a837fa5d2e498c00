"""Layouts of a search: all legal ones and no other, and estimates of their memory against dry runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.layout import layout_problems
from megatron_grpo.proof.dry_run import dry_run
from megatron_grpo.proof.plan.hardware import hardware
from megatron_grpo.proof.plan.layouts import (
    engine_layout,
    estimate,
    gpus_of,
    layout_name,
    legal_layouts,
    overrides_of,
    static_bytes,
)
from megatron_grpo.weights.shape import ModelShape
from tests.unit.proof.test_dry_run import DENSE, EXPERTS, needs_no_gpu, small_run


def recipe(nodes: int = 1) -> Config:
    config = small_run()
    config.cluster.num_nodes, config.cluster.gpus_per_node, config.cluster.gpu = nodes, 8, "h100"
    config.data.max_input_seq_length, config.generation.max_new_tokens = 32, 32
    config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt = 16, 4
    return config


@pytest.mark.parametrize("shape", [DENSE, EXPERTS])
def test_legal_layouts_use_all_gpus_and_pass_every_check(shape: ModelShape) -> None:
    found = list(legal_layouts(recipe(nodes=2), shape, 8))
    assert {one.policy.parallel.world_size for one in found} == {8}
    assert not any(any(layout_problems(one, shape)) for one in found)
    assert len({(str(one.policy.parallel), one.policy.activation_checkpointing) for one in found}) == len(found)
    sizes = {(one.policy.parallel.tensor, one.policy.parallel.pipeline) for one in found}
    heads, groups, layers = shape.attention_heads, shape.key_value_heads, shape.layers
    legal = {(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4) if heads % t == 0 and layers % p == 0 and t * p <= 8}
    assert sizes == {
        one for one in legal if shape.ffn_hidden % one[0] == 0 and (groups % one[0] == 0 or one[0] % groups == 0)
    }
    assert ({one.policy.parallel.expert for one in found} > {1}) == (shape.experts is not None)


def test_gpus_are_shared_as_in_the_recipe() -> None:
    config = recipe(nodes=8)
    config.policy.parallel.data, config.generation.parallel.data = 6, 2
    assert gpus_of(config) == (48, 16)
    config.generation.placement = "colocated"
    assert gpus_of(config) == (64, 64)


def test_overrides_of_a_layout_give_it_back() -> None:
    config = recipe()
    config.policy.parallel = replace(config.policy.parallel, tensor=2, data=4, sequence=True)
    found = overrides_of(config)
    assert {"policy.parallel.tensor=2", "policy.parallel.data=4", "policy.parallel.sequence=true"} <= set(found)
    assert "policy.activation_checkpointing=false" in found
    assert layout_name(config) == "TP2 DP4"


def test_engines_without_room_are_an_error_with_the_sizes() -> None:
    gpu = replace(hardware("h100"), memory_gib=0.001)
    with pytest.raises(ValueError, match="room for 64 tokens"):
        engine_layout(recipe(), DENSE, gpu, 4)
    assert engine_layout(recipe(), DENSE, hardware("h100"), 4).generation.parallel.ranks_per_engine in (1, 2)


@needs_no_gpu
@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        (DENSE, {"tensor": 2, "sequence": True, "data": 4}),
        (EXPERTS, {"expert": 2, "data": 4}),
        (DENSE, {"pipeline": 2}),
    ],
)
def test_static_bytes_are_those_of_a_dry_run(shape: ModelShape, parallel: dict[str, int | bool]) -> None:
    config = small_run(**parallel)
    holders = dry_run(config, shape, 0, moves=False).holders
    counted = sum(holders[kind] for kind in ("weights", "gradients", "optimizer"))
    assert static_bytes(config, shape) == pytest.approx(counted, rel=0.06)  # norms and padding are left out


def test_estimates_grow_with_recomputation_and_bubbles() -> None:
    config, gpu = recipe(), hardware("h100")
    config.policy.parallel = replace(config.policy.parallel, data=2, pipeline=4)
    plain = estimate(config, DENSE, gpu)
    config.policy.activation_checkpointing = True
    assert estimate(config, DENSE, gpu) > plain
    config.policy.activation_checkpointing = False
    config.policy.parallel = replace(config.policy.parallel, data=8, pipeline=1)
    assert estimate(config, DENSE, gpu) < plain
