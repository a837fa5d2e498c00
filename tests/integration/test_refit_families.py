"""Further families from Megatron ranks into vLLM engines, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma4TextConfig, Llama4TextConfig, PretrainedConfig

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import REFIT, assert_serves, ray_cluster, start_policy
from tests.integration.vllm_helpers import Oracle, engines, make_model

__all__ = ["ray_cluster"]  # a fixture of every test here


def llama4(**sizes: Any) -> PretrainedConfig:
    """A Llama 4 of a dense layer with chunks and one without rotary embedding that has experts."""
    experts = {"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 80}
    layers = {"no_rope_layers": [1, 0], "attention_chunk_size": 128, "floor_scale": 4, "attn_scale": 0.5}
    return Llama4TextConfig(**{**sizes, "tie_word_embeddings": False}, **experts, **layers)


def gemma4(**sizes: Any) -> PretrainedConfig:
    """A Gemma 4 with one layer of either kind, whose window is shorter than the tests' sequences."""
    heads = {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    types = ["sliding_attention", "full_attention"]
    others = {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0, "sliding_window": 6}
    return Gemma4TextConfig(**sizes, **heads, **others, layer_types=types)


def gemma4_moe(**sizes: Any) -> PretrainedConfig:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
    return gemma4(**sizes, **experts)


FAMILIES: dict[str, tuple[Callable[..., PretrainedConfig], ParallelConfig]] = {
    "llama4": (llama4, ParallelConfig(tensor=2, expert=2, sequence=True)),
    "gemma4": (gemma4, ParallelConfig(tensor=2)),
    "gemma4_moe": (gemma4_moe, ParallelConfig(tensor=2, expert=2, sequence=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_generation_equals_transformers_before_and_after_each_refit(name: str, tmp_path: Path) -> None:
    family, layout = FAMILIES[name]
    base = make_model(tmp_path / "base", seed=0, family=family)
    trained = make_model(tmp_path / "trained", seed=1, family=family)
    policy = start_policy(trained, layout)
    try:
        with engines(base, tensor=2) as generation:
            assert_serves(generation, Oracle(base), version=0)
            policy.wait_ready()
            transport = make_transport(policy, generation, REFIT, Path())
            transport.connect()
            for version in (1, 2):  # what the first one left behind is what the second one meets
                transport.publish(version)
                assert_serves(generation, Oracle(trained), version)
    finally:
        policy.shutdown()
