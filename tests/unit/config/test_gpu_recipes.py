"""Recipes for GPUs against the released models and the machines that they name."""

from __future__ import annotations

import pytest

from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import can_travel_in_fp8, index_tensors
from megatron_grpo.planning.engine_shards import assume_boxes, split_engine
from megatron_grpo.preflight.load import check_config
from megatron_grpo.weight_sync.boxes import Box, count_elements
from tests.support.recipes import COMMANDS, FP8, GPU_RECIPES, recipe_config

GPU_BYTES = 79.1 * 2**30
"""Memory of an H100 with 80 GB, as CUDA shows it."""
CACHED_TOKENS = 2**17
"""Tokens that the cache of an engine's rank has room for at least."""
OF_VLLM = 4e9
"""Bytes assumed for an engine rank's activations, CUDA graphs and communicators."""


def problems(config: Config, monkeypatch: pytest.MonkeyPatch) -> str:
    """All that `--check` would say on a machine without GPUs, which is the last thing it looks for."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return "; ".join(problem.text for problem in check_config(config).problems)


@pytest.mark.turns(3)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_they_fit_their_models_and_use_all_gpus(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe_config(*command)
    assert problems(config, monkeypatch).startswith("this machine has no CUDA GPU")
    policy, engines = config.policy.parallel.world_size, engine_ranks(config)
    used = max(policy, engines) if config.generation.is_colocated else policy + engines
    assert used == config.cluster.num_nodes * config.cluster.gpus


@pytest.mark.turns(3)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_engines_hold_the_model_and_a_cache(command: tuple[str, ...]) -> None:
    """An engine is inside a node, and no pipeline, unless its weights exceed the node."""
    config = recipe_config(*command)
    shape, parallel = read_model_shape(config.policy.model.path), config.generation.parallel
    share = config.generation.engine.gpu_memory_utilization * GPU_BYTES - OF_VLLM
    weights = weigh_ranks(assume_boxes(shape, parallel), shape, config.refit.fp8_blocks)
    most_layers = max(len(shard.layers) for shard in split_engine(parallel, shape))
    cache = cache_of_a_token(shape, parallel.tensor) * most_layers * CACHED_TOKENS
    assert max(weights) + cache <= share
    exceed = sum(weights) > share * config.cluster.gpus
    assert exceed == (parallel.ranks_per_engine > config.cluster.gpus) == (parallel.pipeline > 1)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("recipe", "tensor", "pipeline", "data"), [("qwen3_8b_8gpu", 2, 2, 1), ("llama3_70b_slurm", 8, 2, 2)]
)
def test_engines_may_be_pipelines(
    recipe: str, tensor: int, pipeline: int, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe_config(f"+exp={recipe}")
    before, parallel = engine_ranks(config), config.generation.parallel
    parallel.tensor, parallel.pipeline, parallel.data = tensor, pipeline, data
    assert engine_ranks(config) == before
    assert problems(config, monkeypatch).startswith("this machine has no CUDA GPU")


def test_latent_attention_can_be_trained_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = problems(recipe_config("+exp=deepseek_v3_64nodes", FP8), monkeypatch)
    assert refusals.startswith("this machine has no CUDA GPU")


def test_every_model_has_a_recipe() -> None:
    sizes = ["qwen3_0_6b", "qwen3_1_7b", "qwen3_8b", "qwen3_32b", "qwen3_30b_a3b", "qwen3_235b_a22b"]
    newer = ["qwen3_5", "gpt_oss", "glm_4", "kimi_k2", "moonlight", "nvidia_nemotron_3"]
    for size in (*sizes, *newer, "llama3_8b", "llama3_70b", "deepseek_v3"):
        assert any(name.startswith(f"{size}_") for name in GPU_RECIPES), size


def engine_ranks(config: Config) -> int:
    """Ranks of all engines."""
    return config.generation.parallel.ranks_per_engine * config.generation.parallel.data


def weigh_ranks(ranks: list[list[Box]], shape: ModelShape, fp8_blocks: bool) -> list[int]:
    """Bytes of the weights of each rank of an engine, in bfloat16 or, what can be, in FP8."""
    entries = build_weight_map(shape)
    in_fp8 = [fp8_blocks and can_travel_in_fp8(entry) for entry in entries]
    widths = {name: 1 if in_fp8[key.row] else 2 for name, key in index_tensors(entries, shape).items()}
    return [sum(widths[box.tensor] * count_elements(box.layout.tensor) for box in boxes) for boxes in ranks]


def cache_of_a_token(shape: ModelShape, tensor: int) -> int:
    """Bytes of a layer's cache for a token on one rank, in bfloat16: keys and values of its heads; or
    the short vector of latent attention, which every rank holds."""
    if shape.latent is not None:
        return 2 * (shape.latent.rank + shape.latent.rope_dim)
    return 2 * 2 * shape.head_dim * max(shape.key_value_heads // tensor, 1)
