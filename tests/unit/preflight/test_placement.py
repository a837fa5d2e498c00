"""Engines on the GPUs of the policy: what is refused, and how GPUs are counted."""

from __future__ import annotations

import re

import pytest

from megatron_grpo.config.suggestions import describe_counterpart
from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.preflight.config_checks import find_config_problems
from megatron_grpo.preflight.engine_checks import find_length_problems, find_placement_problems
from megatron_grpo.preflight.layout_checks import find_layout_problems
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.remarks import find_remarks

RECIPE = "+exp=qwen3_1_7b_one_gpu"
COLOCATED = "generation.placement=colocated"
QWEN3_1_7B = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 28,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def said(*overrides: str) -> dict[str, str]:
    """What is wrong with the recipe for one GPU, changed in its values, which are then not checked again."""
    config = compose_config([RECIPE])
    for override in overrides:
        name, _, value = override.partition("=")
        *path, last = name.split(".")
        section = config
        for part in path:
            section = getattr(section, part)
        setattr(section, last, type(getattr(section, last))(value) if value != "true" else True)
    problems = [*find_placement_problems(config), *find_layout_problems(config, None)]
    return {problem.subject: problem.text for problem in problems}


def test_one_gpu_is_enough_for_the_recipe() -> None:
    config = compose_config([RECIPE])
    shape = parse_model_shape(QWEN3_1_7B)
    assert [
        *find_config_problems(config),
        *find_layout_problems(config, shape),
        *find_length_problems(config, shape),
    ] == []
    assert list(find_remarks(config)) == []
    assert config.cluster.gpus == config.policy.parallel.world_size == 1


def test_apart_the_same_layouts_take_two_gpus() -> None:
    text = said("generation.placement=separate")["cluster.gpus_per_node=1"]
    assert "1 node(s) have 1 GPUs, but policy.parallel takes 1 and generation.parallel 1" in text


SIX_RANKS = [
    "policy.parallel.data=2",
    "policy.parallel.pipeline=3",
    "generation.parallel.tensor=2",
    "generation.parallel.data=3",
]


def test_engines_beside_a_policy_may_be_on_several_nodes() -> None:
    assert not said("cluster.num_nodes=3", "cluster.gpus_per_node=2", *SIX_RANKS)


@pytest.mark.parametrize(
    ("changes", "subject", "text"),
    [
        (
            ["cluster.num_nodes=2", "cluster.gpus_per_node=3", *SIX_RANKS],
            "generation.parallel",
            "2 GPUs of an engine do not divide the 3 of a node; use a divisor",
        ),
        (["refit.mode=broadcast"], "refit.mode=broadcast", "use reshard"),
        (["policy.fp8.parameters=true"], "policy.fp8.parameters=True", "use false"),
        (
            ["cluster.gpus_per_node=4", "policy.parallel.data=4", "generation.parallel.tensor=2"],
            "generation.parallel",
            r"has 2 ranks \(tensor=2 x pipeline=1 x data=1\), fewer than the 4 GPUs .*; use data=2",
        ),
        (
            ["cluster.gpus_per_node=4", "policy.parallel.data=2", "generation.parallel.tensor=4"],
            "generation.parallel",
            "has 4 ranks .*, more than the 2 GPUs of the policy that engines share; use other sizes",
        ),
        (
            ["algorithm=ppo", "cluster.gpus_per_node=2", "value.parallel.data=2"],
            "value.parallel",
            "has 2 ranks, more than the 1 GPUs",
        ),
    ],
)
def test_what_cannot_be(changes: list[str], subject: str, text: str) -> None:
    found = said(*changes)
    assert found.keys() == {subject}
    assert re.search(text, found[subject]), found[subject]


def test_a_cache_does_not_outlast_the_sleep_of_engines() -> None:
    for algorithm in ("grpo", "ppo"):
        config = compose_config(["+exp=quickstart", COLOCATED])
        config.algorithm = algorithm  # type: ignore[assignment]
        config.training_loop.async_grpo.enabled = True
        assert not list(find_placement_problems(config))
        config.training_loop.async_grpo.recompute_kv_cache_after_weight_updates = False
        (problem,) = find_placement_problems(config)
        assert problem.subject == COLOCATED
        assert f"use separate, or {algorithm}.async_grpo.recompute_kv_cache_after_weight_updates=true" in problem.text


@pytest.mark.parametrize(
    "name", ["policy.generation.colocated.enabled", "vllm_mode", "actor_rollout_ref.hybrid_engine"]
)
def test_other_frameworks_have_other_names_for_it(name: str) -> None:
    assert str(describe_counterpart(name, "grpo")).endswith(" is generation.placement here")
