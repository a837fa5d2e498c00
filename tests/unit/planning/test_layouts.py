"""Layouts of a search: all legal ones and no other, the reasons of the others, GPUs of policy and engines."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.engine_layouts import find_best_engines
from megatron_grpo.planning.policy_layouts import (
    count_idle_gpus,
    iterate_legal_layouts,
    list_overrides,
    name_layout,
    split_gpus,
)
from megatron_grpo.planning.refusals import Refusals
from megatron_grpo.platform.hardware import load_hardware
from megatron_grpo.preflight.config_checks import find_problems
from tests.unit.planning.test_dry_run import DENSE, EXPERTS, small_run


def recipe(nodes: int = 1, prompts: int = 16) -> Config:
    config = small_run()
    config.cluster.num_nodes, config.cluster.gpus_per_node, config.cluster.gpu = nodes, 8, "h100"
    if nodes > 1:
        config.cluster.ray_address = "10.0.0.1:6379"
    config.data.max_input_seq_length, config.generation.max_new_tokens = 32, 32
    config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt = prompts, 4
    return config


def sizes(parallel: ParallelConfig) -> tuple[int, ...]:
    return parallel.tensor, parallel.pipeline, parallel.context, parallel.expert, parallel.data


def passing(config: Config, shape: ModelShape, gpus: int) -> set[tuple[int, ...]]:
    """Sizes of all layouts with equal stages that the run's checks let pass, by trying every combination."""
    legal_sizes = set()
    divisors = [number for number in range(1, gpus + 1) if gpus % number == 0]
    for tensor, pipeline, context, expert in product(divisors, divisors, divisors, range(1, gpus + 1)):
        if gpus % (tensor * pipeline * context):
            continue
        parallel = ParallelConfig(
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            data=gpus // (tensor * pipeline * context),
            sequence=tensor > 1,
        )
        if not find_problems(replace(config, policy=replace(config.policy, parallel=parallel)), shape):
            legal_sizes.add(sizes(parallel))
    return legal_sizes


@pytest.mark.parametrize("shape", [DENSE, EXPERTS])
@pytest.mark.parametrize(("gpus", "prompts"), [(8, 16), (6, 16), (12, 18), (10, 7)])
def test_legal_layouts_are_those_that_the_runs_checks_let_pass(shape: ModelShape, gpus: int, prompts: int) -> None:
    config, refusals = recipe(nodes=2, prompts=prompts), Refusals()
    layouts = list(iterate_legal_layouts(config, shape, gpus, refusals))
    assert not any(find_problems(layout, shape) for layout in layouts)
    assert {layout.policy.parallel.world_size for layout in layouts} <= {gpus}
    kinds = {(str(layout.policy.parallel), layout.policy.activation_checkpointing) for layout in layouts}
    assert len(kinds) == len(layouts)
    equal = {sizes(layout.policy.parallel) for layout in layouts if layout.policy.parallel.first_stage_layers is None}
    assert equal == passing(config, shape, gpus)


@pytest.mark.parametrize("shape", [DENSE, EXPERTS])
def test_every_reason_of_a_refusal_is_one_of_the_runs_checks(shape: ModelShape) -> None:
    config, refusals = recipe(nodes=2, prompts=7), Refusals()
    list(iterate_legal_layouts(config, shape, 10, refusals))
    assert refusals.counts
    for problem in refusals.counts:
        key, _, value = problem.subject.partition("=")
        name = key.rpartition(".")[2]
        assert key.startswith("policy.parallel."), problem
        size = int(value)
        alone: dict[str, Any] = {name: size, "sequence": name == "tensor" and size > 1}
        if name == "virtual_pipeline" or "first_stage_layers" in problem.text:
            continue
        changed_config = replace(config, policy=replace(config.policy, parallel=ParallelConfig(**alone)))
        assert problem in find_problems(changed_config, shape)


def test_stages_that_do_not_divide_the_layers_get_ends_that_do() -> None:
    """Twenty GPUs of five nodes have layouts of 36 layers: five stages, of which the ends have fewer."""
    config, shape = recipe(nodes=5), replace(DENSE, layers=36)
    pipelines = {layout.policy.parallel.pipeline: layout for layout in iterate_legal_layouts(config, shape, 20)}
    assert 5 in pipelines
    assert not find_problems(pipelines[5], shape)
    assert "policy.parallel.first_stage_layers=" in " ".join(list_overrides(pipelines[5]))


def test_gpus_are_shared_as_in_the_recipe_first() -> None:
    config = recipe(nodes=8)
    config.policy.parallel.data, config.generation.parallel.data = 6, 2
    splits = split_gpus(config)
    assert splits[0] == (48, 16)
    assert all(policy_gpus + engine_gpus <= 64 for policy_gpus, engine_gpus in splits)
    smaller = [min(policy_gpus / 48, engine_gpus / 16, 1) for policy_gpus, engine_gpus in splits]
    assert smaller == sorted(smaller, reverse=True)
    config.generation.placement = "colocated"
    assert split_gpus(config)[:2] == [(64, 64), (63, 63)]


def test_gpus_of_the_value_model_are_not_shared_out() -> None:
    config = replace(recipe(nodes=2), algorithm="ppo")
    config.value.parallel.tensor = 4
    config.policy.parallel.data, config.generation.parallel.data = 2, 2
    assert split_gpus(config)[0] == (6, 6)


def test_idle_gpus_are_those_that_nothing_uses() -> None:
    config = recipe(nodes=3)
    config.policy.parallel.data, config.generation.parallel.data = 4, 4
    assert count_idle_gpus(config) == 16
    config = replace(config, algorithm="ppo")
    config.value.parallel.data = 2
    assert count_idle_gpus(config) == 14


def test_overrides_of_a_layout_give_it_back() -> None:
    config = recipe()
    config.policy.parallel = replace(config.policy.parallel, tensor=2, data=4, sequence=True)
    overrides = list_overrides(config)
    assert {"policy.parallel.tensor=2", "policy.parallel.data=4", "policy.parallel.sequence=true"} <= set(overrides)
    assert "policy.activation_checkpointing=false" in overrides
    assert name_layout(config) == "TP2 DP4"


def test_engines_without_room_are_refused_with_the_sizes() -> None:
    gpu, refusals = replace(load_hardware("h100"), memory_gib=0.001), Refusals()
    assert find_best_engines(recipe(), DENSE, gpu, 4, 4, refusals) is None
    (problem, *_) = refusals.list_problems()
    assert "leaves a cache of 0 tokens" in " ".join(refusals.render_lines())
    assert problem.subject.startswith("generation.parallel.tensor=")
    best_engines = find_best_engines(recipe(), DENSE, load_hardware("h100"), 4, 4, Refusals())
    assert best_engines.generation.parallel.ranks_per_engine * best_engines.generation.parallel.data == 4


def test_engines_share_samples_out_unevenly() -> None:
    """Prompts go to the idlest engine, so 64 samples need not divide by the engines of three nodes."""
    config = recipe(nodes=3)
    best_engines = find_best_engines(config, DENSE, load_hardware("h100"), 12, 12, Refusals())
    assert best_engines.generation.parallel.ranks_per_engine * best_engines.generation.parallel.data == 12


def test_engines_that_would_cross_nodes_are_refused() -> None:
    config, shape = recipe(nodes=2), replace(DENSE, attention_heads=6, key_value_heads=6, ffn_hidden=96)
    config.policy.parallel.data = 4  # leaves 4 GPUs of one node and 8 of the other
    config.generation.parallel.tensor, config.generation.parallel.data = 6, 2
    (problem,) = find_problems(config, shape)
    assert problem.subject == "generation.parallel.data=2"
    assert "engines of 6 GPUs fit 1 times into the 4 + 8 GPUs that the models leave of the nodes" in problem.text
