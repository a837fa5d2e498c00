"""OLMo 3 and MiniMax-M2: all heads of queries, and all of keys, are normalised together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.deepseek_v3 import EXPERT_BIAS
from megatron_grpo.models.families.family import Family
from megatron_grpo.models.families.gemma3 import GLOBAL, LOCAL, list_windowed_layers
from megatron_grpo.models.families.llama import ATTENTION, INPUT_NORM, MLP, MLP_NORM, read_dense
from megatron_grpo.models.families.mixtures import EXPERTS, MIXTRAL_NAMES, read_expert_count, read_top_k
from megatron_grpo.models.families.options import WINDOW
from megatron_grpo.models.families.rotary import read_rotary_by_kind
from megatron_grpo.models.shape import ExpertShape, ModelShape, read_section, read_size

# Each rank holds the weights of all heads, since several ranks may share a key.
_QK_NORM = """
    attention: self_attention.q_layernorm.weight [all_queries] = self_attn.q_norm.weight
    attention: self_attention.k_layernorm.weight [all_keys] = self_attn.k_norm.weight
"""
_POST_NORMS = """
    mixer: self_attention.linear_proj.post_norm.weight [hidden] = post_attention_layernorm.weight
    mlp: mlp.linear_fc2.post_norm.weight [hidden] = post_feedforward_layernorm.weight
"""
# transformers' defaults for keys that config.json lacks, where they differ from Llama's.
_OLMO3_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096}
_OLMO3_THETA = 500000.0
_MINIMAX_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6}


def _read_olmo3(raw: dict[str, Any]) -> ModelShape:
    if raw.get("rope_theta", _OLMO3_THETA) != _OLMO3_THETA and not raw.get("rope_parameters"):
        raise ValueError(
            f"rope_theta={to_text(raw['rope_theta'])} is not supported for olmo3: transformers 5 would leave it out in "
            f"layers with windows; write rope_parameters with {LOCAL} and {GLOBAL}"
        )
    settings = {**_OLMO3_DEFAULTS, **raw}
    thetas = {LOCAL: _OLMO3_THETA, GLOBAL: _OLMO3_THETA}
    local_theta, global_rope = read_rotary_by_kind(
        {key: value for key, value in raw.items() if key != "rope_local_base_freq"}, LOCAL, GLOBAL, thetas
    )
    if global_rope.get("truncate", True) is not True:
        raise ValueError(
            f"truncate={to_text(global_rope['truncate'])} of the rotary embedding is not supported for olmo3: "
            "transformers ignores it; remove it"
        )
    set_aside = ("rope_scaling", "rope_theta", "original_max_position_embeddings")
    as_dense = {key: value for key, value in settings.items() if key not in set_aside}
    shape = read_dense(
        {**as_dense, "rope_parameters": global_rope},
        "olmo3",
        rope_types=("default", "linear", "llama3", "yarn"),
        nullable=("num_key_value_heads",),
        windows=True,
    )
    windowed = list_windowed_layers({"sliding_window_pattern": 4, "layer_types": raw.get("layer_types")}, shape.layers)
    has_two = any(windowed) and (local_theta, None) != (shape.rope_theta, shape.rope_scaling)
    return replace(
        shape,
        full_width_qk_norm=True,
        pre_norms=False,
        post_norms=True,
        window=read_size(settings, "sliding_window") if any(windowed) else None,
        windowed=windowed,
        local_rope_theta=local_theta if has_two else None,
    )


def _read_minimax_m2(raw: dict[str, Any]) -> ModelShape:
    # vLLM reads these keys from the file alone; transformers' model has no other values.
    for key, value in (("scoring_func", "sigmoid"), ("use_routing_bias", True)):
        if raw.get(key) != value:
            raise ValueError(
                f"{key}={to_text(raw.get(key))} is not supported for minimax_m2, and without it vLLM would compute "
                f'another model; write "{key}": {to_text(value)}'
            )
    head_dim, rotated = read_size(raw, "head_dim", 128), read_size(raw, "rotary_dim")
    share = rotated / head_dim
    shape = read_dense(
        {"partial_rotary_factor": share, **raw},
        "minimax_m2",
        defaults=_MINIMAX_DEFAULTS,
        options={**WINDOW, "tie_word_embeddings": (False,)},
        rotated=share,
    )
    rope = read_section(raw, "rope_scaling", "rope_parameters")
    for holder in (raw, rope):
        if holder.get("partial_rotary_factor", share) != share:
            raise ValueError(
                f"partial_rotary_factor={to_text(holder['partial_rotary_factor'])} contradicts rotary_dim={rotated} of "
                f"head_dim={head_dim}; keep rotary_dim alone"
            )
    count = read_expert_count(raw, "num_experts", "num_local_experts", 256)
    experts = ExpertShape(
        count=count,
        ffn_hidden=shape.ffn_hidden,
        top_k=read_top_k({"num_experts_per_tok": 8, **raw}, count),
        layers=(True,) * shape.layers,
        score="sigmoid",
        selection_bias=True,
    )
    return replace(shape, full_width_qk_norm=True, experts=experts)


FAMILIES = (
    Family(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        read=_read_olmo3,
        tables=(ATTENTION, _QK_NORM, _POST_NORMS, MLP),
    ),
    Family(
        name="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        has_reward_models=False,
        read=_read_minimax_m2,
        tables=(INPUT_NORM, ATTENTION, _QK_NORM, MLP_NORM, EXPERTS, EXPERT_BIAS),
        renamed={"mlp.gate.e_score": "block_sparse_moe.e_score", **MIXTRAL_NAMES},
        has_further_predictions=True,
    ),
)
