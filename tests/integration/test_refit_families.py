"""Further families from Megatron ranks into vLLM engines, of which quantized folders give no weights before a refit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)

from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import REFIT, assert_serves, ray_cluster, start_policy
from tests.integration.vllm_helpers import MAX_LENGTH, Oracle, engines, make_model
from tests.support.quantized_folders import FP8_BLOCKS, MXFP4, quantize_folder

__all__ = ["ray_cluster"]  # a fixture of every test here


def glm4_moe(**sizes: Any) -> PretrainedConfig:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1}
    return Glm4MoeConfig(**{**sizes, "tie_word_embeddings": False}, **experts, attention_bias=True, use_qk_norm=True)


def phi3(**sizes: Any) -> PretrainedConfig:
    """A Phi-4-mini: a part of each head is rotated, by LongRoPE's short factors."""
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.5] * 6, "long_factor": [4.0, 8.0] * 6, "rope_theta": 1e4}
    rope |= {"partial_rotary_factor": 0.75}
    sizes |= {"hidden_size": 128}
    return Phi3Config(**sizes, original_max_position_embeddings=MAX_LENGTH, rope_parameters=rope)


def olmo3(**sizes: Any) -> PretrainedConfig:
    """An OLMo 3 whose window is shorter than the tests' sequences."""
    types = ["sliding_attention", "full_attention"]
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e5}
    by_kind = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    return Olmo3Config(**sizes, layer_types=types, sliding_window=6, rope_parameters=by_kind)


def gpt_oss(**sizes: Any) -> PretrainedConfig:
    """A gpt-oss whose window is shorter than the tests' sequences."""
    return GptOssConfig(
        **{**sizes, "tie_word_embeddings": False, "intermediate_size": 128},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
    )


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


FAMILIES: dict[str, tuple[Callable[..., PretrainedConfig], ParallelConfig, dict[str, Any] | None]] = {
    "gpt_oss": (gpt_oss, ParallelConfig(tensor=2, expert=2, sequence=True), None),
    "gpt_oss in MXFP4": (gpt_oss, ParallelConfig(data=2, expert=2), MXFP4),
    "qwen3 in FP8": (partial(Qwen3Config), ParallelConfig(tensor=2), {**FP8_BLOCKS, "weight_block_size": [16, 8]}),
    "glm4": (Glm4Config, ParallelConfig(tensor=2), None),
    "glm4_moe": (glm4_moe, ParallelConfig(tensor=2, expert=2, sequence=True), None),
    "phi3": (phi3, ParallelConfig(tensor=2), None),
    "olmo3": (olmo3, ParallelConfig(tensor=2), None),
    "llama4": (llama4, ParallelConfig(tensor=2, expert=2, sequence=True), None),
    "gemma4": (gemma4, ParallelConfig(tensor=2), None),
    "gemma4_moe": (gemma4_moe, ParallelConfig(tensor=2, expert=2, sequence=True), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_generation_equals_transformers_before_and_after_each_refit(name: str, tmp_path: Path) -> None:
    family, layout, quantization = FAMILIES[name]
    base = make_model(tmp_path / "base", seed=0, family=family)
    trained = make_model(tmp_path / "trained", seed=1, family=family)
    if quantization is not None:
        base, trained = (
            quantize_folder(folder, tmp_path / f"{folder.name}_quantized", quantization) for folder in (base, trained)
        )
    policy = start_policy(trained, layout)
    try:
        with engines(base, tensor=2, awaits_refit=quantization is not None) as generation:
            if quantization is None:
                assert_serves(generation, Oracle(base), version=0)
            policy.wait_ready()
            transport = make_transport(policy, generation, REFIT, Path())
            transport.connect()
            for version in (1, 2):  # what the first one left behind is what the second one meets
                transport.publish(version)
                assert_serves(generation, Oracle(trained), version)
    finally:
        policy.shutdown()
