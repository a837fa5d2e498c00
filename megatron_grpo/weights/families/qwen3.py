"""Qwen3 (dense): Llama's layout with an RMS norm on every query and key head."""

from __future__ import annotations

from megatron_grpo.weights.families.family import Family, in_layer
from megatron_grpo.weights.families.llama import ATTENTION, INPUT, MLP, OUTPUT_NORM, dense_flops, head, read_dense

QK_NORM = (
    in_layer("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight", ("head_dim",))),
    in_layer("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight", ("head_dim",))),
)

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    read=lambda raw: read_dense(raw, "qwen3", qk_norm=True),
    entries=lambda shape: INPUT + ATTENTION + QK_NORM + MLP + OUTPUT_NORM + head(shape.tied_embeddings),
    forward_flops=dense_flops,
)
