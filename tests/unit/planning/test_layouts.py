"""Layouts of a search, GPUs of policy and engines on any number of nodes, and reasons of what is left out."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.engine_layouts import find_best_engines, find_room_problems, iterate_engine_layouts
from megatron_grpo.planning.policy_layouts import (
    count_idle_gpus,
    iterate_legal_layouts,
    list_overrides,
    name_layout,
    split_gpus,
)
from megatron_grpo.planning.refusals import Refusals
from megatron_grpo.planning.search import Share, _build_share, _iterate_shares, compose_for_search
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


@pytest.mark.turns(3)
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


@pytest.mark.turns(3)
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


def test_gpus_of_the_value_model_are_neither_shared_out_nor_idle() -> None:
    config = replace(recipe(nodes=2), algorithm="ppo")
    config.value.parallel.tensor = 4
    config.policy.parallel.data, config.generation.parallel.data = 2, 2
    assert split_gpus(config)[0] == (6, 6)
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
    # Prompts go to the idlest engine, so 64 samples need not divide by the engines of three nodes.
    for nodes, gpus in ((1, 4), (3, 12)):
        best = find_best_engines(recipe(nodes), DENSE, load_hardware("h100"), gpus, gpus, Refusals())
        assert best.generation.parallel.ranks_per_engine * best.generation.parallel.data == gpus


def test_engines_that_would_cross_nodes_are_refused() -> None:
    config, shape = recipe(nodes=2), replace(DENSE, attention_heads=6, key_value_heads=6, ffn_hidden=96)
    config.policy.parallel.data = 4  # leaves 4 GPUs of one node and 8 of the other
    config.generation.parallel.tensor, config.generation.parallel.data = 6, 2
    (problem,) = find_problems(config, shape)
    assert problem.subject == "generation.parallel.data=2"
    assert "engines of 6 GPUs fit 1 times into the 4 + 8 GPUs that the models leave of the nodes" in problem.text


H100 = load_hardware("h100")
MODELS = {
    "qwen3_8b_8gpu": read_model_shape("tests/data/hf_configs/qwen3_8b"),
    "qwen3_30b_a3b_4nodes": read_model_shape("tests/data/hf_configs/qwen3_30b_a3b"),
}


def compose_recipe(recipe: str, nodes: int, *overrides: str) -> Config:
    cluster = [f"cluster.nodes={nodes}", "cluster.ray_address=10.0.0.1:6379", "cluster.gpu=h100"]
    return compose_for_search([f"+exp={recipe}", *cluster, *overrides])


def first_share(config: Config, shape: ModelShape) -> tuple[Share, str]:
    return next(_iterate_shares(config, shape, H100))


@pytest.mark.turns(3)
@pytest.mark.parametrize("recipe", MODELS)
@pytest.mark.parametrize("nodes", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (5, 6, 12))])
def test_nodes_that_are_no_power_of_two_have_layouts(recipe: str, nodes: int) -> None:
    share, why = first_share(compose_recipe(recipe, nodes), MODELS[recipe])
    assert sum(share.gpus) == 8 * nodes
    assert not why
    assert len(share.candidates) > 5
    for candidate in share.candidates[:50]:
        assert not find_problems(candidate.config, MODELS[recipe])
        engines = candidate.config.generation.parallel
        assert engines.ranks_per_engine * engines.data == share.gpus[1]


def test_layouts_whose_memory_fits_by_arithmetic_come_first() -> None:
    share, _ = first_share(compose_recipe("qwen3_30b_a3b_4nodes", 5), MODELS["qwen3_30b_a3b_4nodes"])
    usable = H100.memory_gib - H100.reserve_gib
    fitting = [candidate.estimated_gib <= usable for candidate in share.candidates]
    assert fitting == sorted(fitting, reverse=True)
    assert True in fitting
    assert False in fitting
    seconds = [candidate.estimated_s for candidate in share.candidates if candidate.estimated_gib <= usable]
    assert seconds == sorted(seconds)


def test_batches_that_do_not_divide_are_named_with_the_nearest_that_do() -> None:
    shape = MODELS["qwen3_8b_8gpu"]
    config = compose_recipe("qwen3_8b_8gpu", 1, "grpo.num_prompts_per_step=127", "grpo.num_generations_per_prompt=3")
    refusals = Refusals()
    _build_share(config, shape, H100, (5, 0), refusals)
    texts = {problem.subject: problem.text for problem in refusals.counts}
    assert texts["policy.parallel.data=5"] == (
        "127 prompts x 3 generations = 381 samples do not share out evenly over 5 data-parallel ranks; use "
        "grpo.num_prompts_per_step=125 or 130"
    )
    config.grpo.num_prompts_per_step, config.policy.parallel = 130, ParallelConfig(data=5)
    config.generation.parallel = GenerationParallelConfig()
    assert not find_problems(config, shape)


def test_a_search_without_any_layout_gives_the_runs_reasons() -> None:
    """Engines cannot hold the longest sequence: the reason is the roomiest engine's, with its numbers."""
    shape = replace(MODELS["qwen3_8b_8gpu"], max_positions=10**9)
    longest = ["policy.max_total_sequence_length=8000000", "generation.max_new_tokens=7000000"]
    tokens = ["policy.microbatch_tokens=8000000", "policy.logprob_microbatch_tokens=8000000"]
    config = compose_recipe("qwen3_8b_8gpu", 1, *longest, *tokens)
    with pytest.raises(ValueError, match="no layout of policy and engines on 1 x 8 GPUs passes") as caught:
        first_share(config, shape)
    text = str(caught.value)
    assert "policy.max_total_sequence_length=8000000" in text
    assert "generation.engine.gpu_memory_utilization=0.8 gives it 63.3 GiB" in text


def test_a_recipe_for_more_nodes_is_searched_on_fewer() -> None:
    share, _ = first_share(compose_recipe("qwen3_30b_a3b_4nodes", 2), MODELS["qwen3_30b_a3b_4nodes"])
    assert share.gpus == (8, 8)


def test_a_placement_that_no_layout_helps_is_the_reason() -> None:
    cluster = ["cluster.nodes=3", "cluster.ray_address=10.0.0.1:6379", "cluster.gpu=h100", "refit.mode=broadcast"]
    with pytest.raises(ValueError, match="goes over NCCL, which has one rank a GPU"):
        compose_for_search(["+exp=qwen3_8b_8gpu_colocated", *cluster])


@pytest.mark.slow
@pytest.mark.parametrize(
    "batches",
    [
        ["generation.generation_batch_size=4"],  # at least one response for each engine
        ["generation.generation_batch_size=16000", "generation.engine.max_num_batched_tokens=8192"],
    ],
)
def test_engines_that_are_refused_beside_some_policy_do_not_hide_others(batches: list[str]) -> None:
    """All GPUs have a share of which some engines and some layout of the policy pass together."""
    shape, config = MODELS["qwen3_8b_8gpu"], compose_recipe("qwen3_8b_8gpu", 1, *batches)
    expected = set()
    for policy_gpus, engine_gpus in split_gpus(config):
        for parallel in iterate_engine_layouts(config, shape, engine_gpus):
            engines = replace(config, generation=replace(config.generation, parallel=parallel))
            layouts = iterate_legal_layouts(engines, shape, policy_gpus)
            if not find_room_problems(engines, shape, H100) and next(layouts, None) is not None:
                expected.add((policy_gpus, engine_gpus))
                break
    assert {share.gpus for share, _ in _iterate_shares(config, shape, H100)} == expected


@pytest.mark.parametrize("policy_gpus", [3, 4])
def test_engines_do_not_cut_blocks_of_fp8(policy_gpus: int) -> None:
    """Four ranks would, which share an expert's width of 768."""
    shape = MODELS["qwen3_30b_a3b_4nodes"]
    config = compose_recipe("qwen3_30b_a3b_4nodes", 2, "+precision=fp8_engines")
    refusals, without_blocks = Refusals(), Refusals()
    engines = find_best_engines(config, shape, H100, policy_gpus, 12, refusals)
    assert engines is not None
    assert next(iterate_legal_layouts(engines, shape, 4), None) is not None
    config.refit.fp8_blocks = False
    assert find_best_engines(config, shape, H100, policy_gpus, 12, without_blocks) is not None
    (only_of_blocks,) = refusals.counts.keys() - without_blocks.counts.keys()
    assert "ranks would share a block of 128 x 128" in only_of_blocks.text
