"""Further families from Megatron ranks into vLLM engines, of which quantized folders give no weights before a refit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    Ministral3Config,
    MistralConfig,
    NemotronHConfig,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    SeedOssConfig,
)

from megatron_grpo.config.generation_schema import RefitMode
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
    rest = {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0, "sliding_window": 6}
    return Gemma4TextConfig(**sizes, **heads, **rest, layer_types=types)


def gemma4_moe(**sizes: Any) -> PretrainedConfig:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
    return gemma4(**sizes, **experts)


def nemotron_h(**sizes: Any) -> PretrainedConfig:
    """A Nemotron-H with a layer of each kind but experts, for which vLLM has no kernel on a CPU.

    Many of its time steps are below the bound that transformers would take from config.json.
    """
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
    mamba |= {"time_step_min": 0.3, "time_step_max": 1.0}
    layers = ["linear_attention", "mlp", "full_attention"]
    return NemotronHConfig(**{**sizes, "tie_word_embeddings": False}, **mamba, layers_block_type=layers)


def mistral(**sizes: Any) -> PretrainedConfig:
    return MistralConfig(**sizes, sliding_window=None)


def ministral3(**sizes: Any) -> PretrainedConfig:
    """A Ministral 3; its queries are scaled behind `MAX_LENGTH` tokens, which vLLM does not do."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": MAX_LENGTH}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    return Ministral3Config(**sizes, rope_parameters=rope)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how policy and engine share it, and how the weights travel."""

    family: Callable[..., PretrainedConfig]
    layout: ParallelConfig
    expert: int = 1
    mode: RefitMode = "broadcast"
    quantization: dict[str, Any] | None = None


CASES = {
    "gpt_oss": Case(family=gpt_oss, layout=ParallelConfig(tensor=2, expert=2, sequence=True)),
    "gpt_oss reshard": Case(family=gpt_oss, layout=ParallelConfig(data=2, expert=2), mode="reshard", expert=2),
    "gpt_oss in MXFP4": Case(
        family=gpt_oss, layout=ParallelConfig(data=2, expert=2), mode="reshard", quantization=MXFP4
    ),
    "qwen3 in FP8": Case(
        family=Qwen3Config, layout=ParallelConfig(tensor=2), quantization={**FP8_BLOCKS, "weight_block_size": [16, 8]}
    ),
    "glm4": Case(family=Glm4Config, layout=ParallelConfig(tensor=2)),
    "glm4_moe": Case(family=glm4_moe, layout=ParallelConfig(tensor=2, expert=2, sequence=True)),
    "phi3": Case(family=phi3, layout=ParallelConfig(tensor=2)),
    "olmo3": Case(family=olmo3, layout=ParallelConfig(tensor=2)),
    "llama4": Case(family=llama4, layout=ParallelConfig(tensor=2, expert=2, sequence=True)),
    "gemma4": Case(family=gemma4, layout=ParallelConfig(tensor=2)),
    "gemma4_moe": Case(family=gemma4_moe, layout=ParallelConfig(tensor=2, expert=2, sequence=True)),
    "mistral": Case(family=mistral, layout=ParallelConfig(tensor=2)),
    "ministral3": Case(family=ministral3, layout=ParallelConfig(tensor=2)),
    "seed_oss": Case(family=SeedOssConfig, layout=ParallelConfig(tensor=2)),
    "nemotron_h": Case(family=nemotron_h, layout=ParallelConfig(tensor=2)),
    "nemotron_h reshard": Case(family=nemotron_h, layout=ParallelConfig(tensor=2), mode="reshard"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_generation_equals_transformers_before_and_after_each_refit(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    quantization = case.quantization
    base = make_model(tmp_path / "base", seed=0, family=case.family)
    trained = make_model(tmp_path / "trained", seed=1, family=case.family)
    if quantization is not None:
        base, trained = (
            quantize_folder(folder, tmp_path / f"{folder.name}_quantized", quantization) for folder in (base, trained)
        )
    policy = start_policy(trained, case.layout)
    try:
        with engines(base, tensor=2, expert=case.expert, awaits_refit=quantization is not None) as generation:
            if quantization is None:
                assert_serves(generation, Oracle(base), version=0)
            policy.wait_ready()
            transport = make_transport(policy, generation, replace(REFIT, mode=case.mode), Path())
            transport.connect()
            for version in (1, 2):  # the second refit starts from what the first left in the engine
                transport.publish(version)
                assert_serves(generation, Oracle(trained), version)
    finally:
        policy.shutdown()
