"""GPUs of policy and engines in a search: layouts on any number of nodes, or reasons that the run's checks confirm."""

from dataclasses import replace

import pytest

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.engine_layouts import find_best_engines, find_room_problems, iterate_engine_layouts
from megatron_grpo.planning.policy_layouts import iterate_legal_layouts, split_gpus
from megatron_grpo.planning.refusals import Refusals
from megatron_grpo.planning.search import Share, _build_share, _iterate_shares, compose_for_search
from megatron_grpo.platform.hardware import load_hardware
from megatron_grpo.preflight.config_checks import find_problems

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
