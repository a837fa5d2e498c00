"""Engines: placement, experts, delta nets, servers, and what is remarked on or refused of them before a start."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.suggestions import describe_counterpart
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.preflight.config_checks import find_config_problems
from megatron_grpo.preflight.engine_checks import CPU_HEAD_SIZES, find_length_problems, find_placement_problems
from megatron_grpo.preflight.layout_checks import find_layout_problems
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.remarks import find_remarks
from megatron_grpo.trainer.messages import make_training_filter
from tests.support.config_problems import problems_of, write_weights

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


def collect_problems(*overrides: str) -> dict[str, str]:
    """What is wrong with the recipe for one GPU, changed in its values, which are then not checked again."""
    config = compose_config([RECIPE])
    if "algorithm=ppo" in overrides:
        config = replace(config, algorithm="ppo")
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
    text = collect_problems("generation.placement=separate")["cluster.gpus_per_node=1"]
    assert "1 node(s) have 1 GPUs, but policy.parallel takes 1 and generation.parallel 1" in text


SIX_RANKS = [
    "policy.parallel.data=2",
    "policy.parallel.pipeline=3",
    "generation.parallel.tensor=2",
    "generation.parallel.data=3",
]


def test_engines_beside_a_policy_may_be_on_several_nodes() -> None:
    assert not collect_problems("cluster.num_nodes=3", "cluster.gpus_per_node=2", *SIX_RANKS)


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
    engine_problems = collect_problems(*changes)
    assert engine_problems.keys() == {subject}
    assert re.search(text, engine_problems[subject]), engine_problems[subject]


def test_a_cache_does_not_outlast_the_sleep_of_engines() -> None:
    for algorithm in ("grpo", "ppo"):
        config = replace(compose_config(["+exp=quickstart", COLOCATED]), algorithm=algorithm)
        config.sampled_loop.async_grpo.enabled = True
        assert not list(find_placement_problems(config))
        config.sampled_loop.async_grpo.recompute_kv_cache_after_weight_updates = False
        (problem,) = find_placement_problems(config)
        assert problem.subject == COLOCATED
        assert f"use separate, or {algorithm}.async_grpo.recompute_kv_cache_after_weight_updates=true" in problem.text


@pytest.mark.parametrize(
    "name", ["policy.generation.colocated.enabled", "vllm_mode", "actor_rollout_ref.hybrid_engine"]
)
def test_other_frameworks_have_other_names_for_it(name: str) -> None:
    assert str(describe_counterpart(name, "grpo")).endswith(" is generation.placement here")


def problems(tensor: int, expert: int, **sizes: int) -> dict[str, str]:
    """Of an engine with this layout and a model with 4 experts, each 128 wide, or other sizes."""
    config = compose_config(["+exp=quickstart_moe"])
    config.generation.parallel = GenerationParallelConfig(tensor=tensor, expert=expert)
    config.policy.parallel.expert = 1  # an odd number of experts is no concern of this test there
    shape = parse_model_shape({**PREPARED_MODELS["addition_moe"], **sizes})
    return {problem.subject: problem.text for problem in find_layout_problems(config, shape)}


@pytest.mark.parametrize(
    ("tensor", "expert", "sizes", "key", "text"),
    [
        (1, 2, {}, "expert=2", "over all ranks of generation.parallel.tensor=1 or over none; use 1, or a larger"),
        (4, 2, {}, "expert=2", "over all ranks of generation.parallel.tensor=4 or over none; use 1 or 4"),
        (2, 2, {"num_experts": 5}, "expert=2", "does not divide the model's 5 experts; use 1"),
        (2, 1, {"moe_intermediate_size": 63}, "tensor=2", "an expert's width of 63; use generation.parallel.expert=2"),
    ],
)
def test_what_does_not_fit(tensor: int, expert: int, sizes: dict[str, int], key: str, text: str) -> None:
    size_problems = problems(tensor, expert, **sizes)
    assert list(size_problems) == [f"generation.parallel.{key}"]
    assert text in size_problems[f"generation.parallel.{key}"]


def test_experts_are_shared_or_their_matrices_split() -> None:
    assert problems(tensor=2, expert=1) == problems(tensor=2, expert=2) == problems(tensor=4, expert=4) == {}
    assert problems(tensor=2, expert=2, moe_intermediate_size=63) == {}, "ranks have whole experts"


ICEPOP = (
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=icepop",
    "loss_fn.truncated_importance_sampling_ratio=5",
    "loss_fn.truncated_importance_sampling_ratio_min=0.5",
)


CORRECTED = ("loss_fn.use_importance_sampling_correction=true",)
FILTERS = ("generation.top_p=0.9", "generation.top_k=20", "generation.min_p=0.05")


@pytest.mark.parametrize("filters", [[remark] for remark in FILTERS] + [list(FILTERS)], ids=[*"pkm", "all"])
@pytest.mark.parametrize(
    "options",
    [ICEPOP, CORRECTED, ["grpo.seq_logprob_error_threshold=1.5"], [*CORRECTED, "grpo.async_grpo.enabled=true"]],
    ids=["icepop", "correction", "threshold", "asynchronous"],
)
def test_filters_that_training_repeats_go_with_what_compares(
    base_overrides: list[str], filters: list[str], options: list[str]
) -> None:
    config = compose_config([*base_overrides, *filters, *options])
    assert config.generation.has_training_filter
    assert not any(remark.key.startswith("generation.") for remark in find_remarks(config))


@pytest.mark.parametrize(
    ("overrides", "repeats"),
    [
        ([], False),
        (["generation.top_k=7"], True),
        (["generation.min_p=0.1", "generation.temperature=0.5"], True),
        (["generation.top_p=0.9", "generation.temperature=0"], False),
        (["generation.top_p=0.9", "generation.repetition_penalty=1.1"], False),
        (["generation.top_p=0.9", "generation.structured.choice=[a,b]"], False),
        (["generation.top_p=1.0", "generation.presence_penalty=1"], False),
    ],
)
def test_when_training_repeats_the_filter(base_overrides: list[str], overrides: list[str], repeats: bool) -> None:
    config = compose_config([*base_overrides, *overrides])
    assert config.generation.has_training_filter == repeats
    training_filter = make_training_filter(config.generation)
    assert (training_filter is not None) == repeats
    if training_filter is not None:
        generation = config.generation
        assert (training_filter.top_k, training_filter.top_p, training_filter.min_p) == (
            generation.top_k,
            generation.top_p,
            generation.min_p,
        )


@pytest.mark.parametrize(("proposed", "method"), [(0, "ngram"), (2, "mtp")])
def test_n_grams_that_nobody_looks_up_are_idle(
    base_overrides: list[str], proposed: int, method: Literal["ngram", "mtp"]
) -> None:
    config = compose_config([*base_overrides, "generation.engine.speculative.prompt_lookup_max=5"])
    config.generation.engine.speculative.num_speculative_tokens = proposed
    config.generation.engine.speculative.method = method
    (remark,) = find_remarks(config)
    assert remark.subject == "generation.engine.speculative.prompt_lookup_max=5"


@pytest.mark.parametrize(("size", "engines", "share"), [(None, 2, 256), (7, 2, 4), (8, 2, 4), (9, 4, 3)])
def test_responses_decoded_together_are_shared_out(
    base_overrides: list[str], size: int | None, engines: int, share: int
) -> None:
    config = compose_config(
        [
            *base_overrides,
            f"generation.parallel.data={engines}",
            f"generation.generation_batch_size={'null' if size is None else size}",
        ]
    )
    assert config.generation.sequences_per_engine == share


def test_vllm_has_attention_for_the_heads_of_the_model(base_overrides: list[str], model: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # here: vLLM takes long to import

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    config = json.loads((model / "config.json").read_text()) | {"head_dim": 16}
    (model / "config.json").write_text(json.dumps(config))
    write_weights(model / "model.safetensors", config)
    problem = problems_of([*base_overrides, "cluster.gpus_per_node=0"])[f"policy.model.path={model}"]
    assert problem.startswith("has heads of 16, for which vLLM has no attention on a CPU; it has 32, 64,")
    compose_config([*base_overrides, "cluster.gpus_per_node=8"])
