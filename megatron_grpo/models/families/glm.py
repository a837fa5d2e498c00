"""GLM: a part of each head is rotated; GLM-4 has norms around its halves, GLM-4.5 to 4.7 experts as DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.deepseek_v3 import EXPERT_BIAS, SHARED_EXPERTS, read_groups, read_sparse_layers
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
from megatron_grpo.models.families.mixtures import EXPERTS, read_expert_count, read_top_k
from megatron_grpo.models.families.options import WINDOW
from megatron_grpo.models.shape import ExpertShape, ModelShape, read_flag, read_number, read_size

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
    count, width = (
        read_expert_count(raw, "num_local_experts", "n_routed_experts", 128),
        read_size(raw, "moe_intermediate_size", 1408),
    )
    top_k = read_top_k({"num_experts_per_tok": 8, **raw}, count)
    groups, top_groups = read_groups({"n_group": 1, "topk_group": 1, **raw}, count, top_k)
    experts = ExpertShape(
        count=count,
        ffn_hidden=width,
        top_k=top_k,
        layers=read_sparse_layers(raw, shape.layers, default=1),
        shared_ffn_hidden=width * read_size(raw, "n_shared_experts", 1),
        score="sigmoid",
        scaling=read_number(raw, "routed_scaling_factor", 1.0),
        selection_bias=True,
        groups=groups,
        top_groups=top_groups,
    )
    return replace(shape, experts=experts)


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
