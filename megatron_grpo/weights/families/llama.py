"""Llama 2 and 3, Qwen2 with biases on queries, keys and values, and Qwen3 with norms on the heads of queries and keys:
sizes and weights of the layout that the other families build on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_grpo.weights.families.family import Family, in_layer
from megatron_grpo.weights.shape import ModelShape, number, section, size

_ROPE_FACTORS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Keys that a rotary embedding with scaled frequencies needs, by rope_type."""

ATTENTION = (
    in_layer(
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        "input_layernorm.weight [hidden]",
    ),
    in_layer(
        "self_attention.linear_qkv.weight",
        "self_attn.q_proj.weight [heads, hidden]",
        "self_attn.k_proj.weight [kv_heads, hidden]",
        "self_attn.v_proj.weight [kv_heads, hidden]",
    ),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight [hidden, heads]"),
)

_QKV_BIAS = (
    in_layer(
        "self_attention.linear_qkv.bias",
        "self_attn.q_proj.bias [heads]",
        "self_attn.k_proj.bias [kv_heads]",
        "self_attn.v_proj.bias [kv_heads]",
    ),
)

QK_NORM = (
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight [head_dim]"),
    in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight [head_dim]"),
)

MLP = (
    in_layer(
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        "post_attention_layernorm.weight [hidden]",
    ),
    in_layer("mlp.linear_fc1.weight", "mlp.gate_proj.weight [ffn, hidden]", "mlp.up_proj.weight [ffn, hidden]"),
    in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight [hidden, ffn]"),
)


def read_dense(
    raw: dict[str, Any],
    family: str,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    rope_types: tuple[str, ...] = ("default", "linear", "llama3"),
) -> ModelShape:
    """Sizes of a dense decoder from a config.json, with the RoPE settings as transformers 4 or 5 spells them.

    Args:
        raw: contents of config.json, by key.
        family: name of the model family that is read.
        qkv_bias: whether the query, key and value projections have biases.
        qk_norm: whether every query and key head is normalised.
        rope_types: kinds of rotary embeddings that the family has.

    Raises:
        ValueError: one of the model's options has no support, or a size is missing or invalid.
    """
    _refuse_unsupported(raw, family, rope_types)
    rope = section(raw, "rope_parameters", "rope_scaling")
    heads, hidden = size(raw, "num_attention_heads"), size(raw, "hidden_size")
    groups = size(raw, "num_key_value_heads", heads)
    if heads % groups:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
    head_dim = size(raw, "head_dim", max(hidden // heads, 1))
    return ModelShape(
        family=family,
        layers=size(raw, "num_hidden_layers"),
        hidden=hidden,
        ffn_hidden=size(raw, "intermediate_size"),
        attention_heads=heads,
        key_value_heads=groups,
        head_dim=head_dim,
        vocab=size(raw, "vocab_size"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope_theta=number(rope, "rope_theta", number(raw, "rope_theta", 10000.0)),
        rope_scaling=None if _rope_type(rope) == "default" else dict(rope),
        max_positions=size(raw, "max_position_embeddings", 0),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _refuse_unsupported(raw: dict[str, Any], family: str, rope_types: tuple[str, ...]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']} is not supported; only silu is")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true is not supported")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ValueError(f"{key}=true is not supported for {family}")
    rope = section(raw, "rope_parameters", "rope_scaling")
    rope_type = _rope_type(rope)
    if rope_type not in rope_types:
        *most, last = rope_types
        raise ValueError(f"rope_type={rope_type} is not supported; {', '.join(most)} and {last} are")
    for key in _ROPE_FACTORS.get(rope_type, ()):
        if rope.get(key) is None:
            raise ValueError(f"rope_type={rope_type} needs {key}")
        number(rope, key, 1.0)


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


FAMILIES = (
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        read=lambda raw: read_dense(raw, "qwen3", qk_norm=True),
        layers=lambda shape: ATTENTION + QK_NORM + MLP,
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        read=lambda raw: read_dense(raw, "qwen2", qkv_bias=True),
        layers=lambda shape: ATTENTION + _QKV_BIAS + MLP,
    ),
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        read=lambda raw: read_dense(raw, "llama"),
        layers=lambda shape: ATTENTION + MLP,
    ),
)
