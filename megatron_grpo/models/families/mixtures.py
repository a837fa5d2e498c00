"""Qwen3-MoE and Mixtral: the attention of Qwen3 and Llama with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import Family, VisionModel
from megatron_grpo.models.families.llama import (
    ATTENTION,
    INPUT_NORM,
    MLP,
    MLP_NORM,
    QK_NORM,
    QWEN3_VL_IMAGES,
    QWEN_DEFAULTS,
    read_dense,
    read_qwen,
)
from megatron_grpo.models.shape import ExpertShape, ModelShape, read_flag, read_size

EXPERTS = """
    experts: mlp.router.weight [experts, hidden] = mlp.gate.weight
    experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [gate * expert_ffn | up * expert_ffn, hidden]
        = mlp.experts.{expert}.gate_proj.weight [gate * expert_ffn, hidden]
        + mlp.experts.{expert}.up_proj.weight [up * expert_ffn, hidden]
    experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [hidden, expert_ffn]
        = mlp.experts.{expert}.down_proj.weight
"""
# Qwen3's mixtures of text have a tensor for each expert's matrix, those with images one for all, transposed.
_QWEN3_EXPERTS = (
    EXPERTS.replace("experts: mlp.experts.", "single_experts: mlp.experts.")
    + """
    packed_experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [gate * expert_ffn | up * expert_ffn, hidden]
        = mlp.experts.gate_up_proj [expert, hidden, gate * expert_ffn | up * expert_ffn]
    packed_experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [hidden, expert_ffn]
        = mlp.experts.down_proj [expert, expert_ffn, hidden]
"""
)
MIXTRAL_NAMES = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def read_expert_count(raw: Mapping[str, Any], alias: str, key: str, default: int) -> int:
    """Read the number of routed experts; `alias`: transformers' other `key`."""
    # transformers, which reads the file for vLLM too, assigns the alias last, so the alias wins.
    return read_size(raw, alias, read_size(raw, key, default))


def read_top_k(raw: Mapping[str, Any], count: int) -> int:
    """Read the number of experts per token; ValueError: missing or too many."""
    top_k = read_size(raw, "num_experts_per_tok")
    if top_k > count:
        raise ValueError(f"num_experts_per_tok={top_k} is more than the {count} experts")
    return top_k


def list_sparse_layers(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """List which layers have experts by `decoder_sparse_step` and `mlp_only_layers`."""
    # Every n-th layer that is not in the list has experts.
    step, dense = read_size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ValueError(f"mlp_only_layers={to_text(dense)} must be a list of layer numbers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


_QWEN3_VL_MOE_DEFAULTS = {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4}


def _read_qwen3_moe(raw: dict[str, Any]) -> ModelShape:
    defaults = {**QWEN_DEFAULTS, "num_key_value_heads": 4}
    shape = read_qwen(raw, "qwen3_moe", qk_norm=True, defaults=defaults)
    count = read_expert_count(raw, "num_local_experts", "num_experts", 128)
    experts = ExpertShape(
        count=count,
        ffn_hidden=read_size(raw, "moe_intermediate_size"),
        top_k=read_top_k(raw, count),
        layers=list_sparse_layers(raw, shape.layers),
        normalised=read_flag(raw, "norm_topk_prob", default=False),
    )
    return replace(shape, experts=experts)


def _read_mixtral(raw: dict[str, Any]) -> ModelShape:
    if raw.get("sliding_window") is not None:
        raise ValueError(f"sliding_window={to_text(raw['sliding_window'])} is not supported for mixtral; only null is")
    defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072}
    shape = read_dense(raw, "mixtral", defaults=defaults, nullable=("head_dim",))
    count = read_expert_count(raw, "num_experts", "num_local_experts", 8)
    experts = ExpertShape(
        count=count, ffn_hidden=shape.ffn_hidden, top_k=read_top_k(raw, count), layers=(True,) * shape.layers
    )
    return replace(shape, experts=experts)


FAMILIES = (
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        read=_read_qwen3_moe,
        tables=(INPUT_NORM, ATTENTION, QK_NORM, MLP_NORM, MLP, _QWEN3_EXPERTS),
        vision=VisionModel(
            architecture="Qwen3VLMoeForConditionalGeneration",
            model_type="qwen3_vl_moe",
            parts=("visual.",),
            text_model_type="qwen3_vl_moe_text",
            packs_experts=True,
            images=replace(QWEN3_VL_IMAGES, defaults={**QWEN3_VL_IMAGES.defaults, **_QWEN3_VL_MOE_DEFAULTS}),
        ),
    ),
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        read=_read_mixtral,
        tables=(INPUT_NORM, ATTENTION, MLP_NORM, EXPERTS),
        renamed=MIXTRAL_NAMES,
    ),
)
