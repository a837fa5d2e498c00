"""GLM: a part of each head is rotated; GLM-4 has norms around its halves, GLM-4.5 to 4.7 experts as DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.deepseek_v3 import EXPERT_BIAS, SHARED_EXPERTS, read_sigmoid_experts
from megatron_grpo.models.families.family import Family
from megatron_grpo.models.families.llama import (
    ATTENTION,
    INPUT_NORM,
    MERGED_MLP,
    MLP,
    MLP_NORM,
    QK_NORM,
    QKV_BIAS,
    read_dense,
)
from megatron_grpo.models.families.mixtures import EXPERTS
from megatron_grpo.models.families.options import WINDOW
from megatron_grpo.models.shape import ModelShape, read_flag

_POST_NORMS = """
    mixer: self_attention.linear_proj.post_norm.weight [hidden] = post_self_attn_layernorm.weight
    mlp: mlp.linear_fc2.post_norm.weight [hidden] = post_mlp_layernorm.weight
"""
_BIASES = {"attention_bias": (True, False)}  # of queries, keys and values alone
# transformers' defaults for keys that config.json lacks, where they differ from Llama's.
_DEFAULTS = {"rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072}
_MOE_DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_ROTATED = 0.5  # share of a head, by default


def _read_dense(raw: dict[str, Any]) -> ModelShape:
    shape = read_dense(
        raw,
        "glm4",
        defaults=_DEFAULTS,
        options={**WINDOW, **_BIASES},
        qkv_bias=read_flag(raw, "attention_bias", default=True),
        rotated=_ROTATED,
    )
    return replace(shape, interleaved_rope=True, post_norms=True)


def _read_mixture(raw: dict[str, Any]) -> ModelShape:
    if raw.get("norm_topk_prob", True) is not True:
        raise ValueError(f"norm_topk_prob={to_text(raw['norm_topk_prob'])} is not supported for glm4_moe; only true is")
    if "head_dim" not in raw:  # transformers derives it
        raise ValueError('has no head_dim, without which vLLM does not load the model; add "head_dim"')
    shape = read_dense(
        raw,
        "glm4_moe",
        defaults=_MOE_DEFAULTS,
        options={**WINDOW, **_BIASES, "tie_word_embeddings": (False,)},
        qkv_bias=read_flag(raw, "attention_bias", default=False),
        qk_norm=read_flag(raw, "use_qk_norm", default=False),
        rotated=_ROTATED,
    )
    sizes = {"num_experts_per_tok": 8, "moe_intermediate_size": 1408, **raw}
    return replace(shape, experts=read_sigmoid_experts(sizes, shape.layers, (1, 1), count=128, scaling=1.0, dense=1))


FAMILIES = (
    Family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        read=_read_dense,
        tables=(INPUT_NORM, ATTENTION, QKV_BIAS, _POST_NORMS, MLP_NORM, MERGED_MLP),
    ),
    Family(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        has_reward_models=False,
        read=_read_mixture,
        tables=(INPUT_NORM, ATTENTION, QKV_BIAS, QK_NORM, MLP_NORM, MLP, EXPERTS, EXPERT_BIAS, SHARED_EXPERTS),
        has_further_predictions=True,
        proposes_tokens=True,
    ),
)
