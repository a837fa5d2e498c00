"""Qwen3 (dense): Llama's layout with an RMS norm on every query and key head."""

from __future__ import annotations

from megatron_grpo.weights.families.family import Family, in_layer
from megatron_grpo.weights.families.llama import ATTENTION, MLP, read_dense

QK_NORM = (
    in_layer("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight", ("head_dim",))),
    in_layer("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight", ("head_dim",))),
)

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    read=lambda raw: read_dense(raw, "qwen3", qk_norm=True),
    layers=lambda shape: ATTENTION + QK_NORM + MLP,
)
