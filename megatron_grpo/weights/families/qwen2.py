"""Qwen2 and Qwen2.5: Llama's layout with biases on the query, key and value projections."""

from __future__ import annotations

from megatron_grpo.weights.families.family import Family, in_layer
from megatron_grpo.weights.families.llama import ATTENTION, MLP, read_dense

QKV_BIAS = (
    in_layer(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", ("heads",)),
        ("self_attn.k_proj.bias", ("kv_heads",)),
        ("self_attn.v_proj.bias", ("kv_heads",)),
        axis=0,
        merge="qkv",
    ),
)

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    read=lambda raw: read_dense(raw, "qwen2", qkv_bias=True),
    layers=lambda shape: ATTENTION + QKV_BIAS + MLP,
)
