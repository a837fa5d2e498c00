"""Gemma-3 (text): windows in most layers, two rotary embeddings, and norms around attention and feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import shown
from megatron_grpo.weights.families.family import Family, in_layer
from megatron_grpo.weights.families.llama import ATTENTION, MLP, QK_NORM, read_dense
from megatron_grpo.weights.shape import ModelShape, number, section, size

_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
"""transformers' defaults for keys that config.json lacks, where they differ from Llama's."""
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
_ACTIVATION = "gelu_pytorch_tanh"


# Llama's norm before the feed-forward network is post_attention_layernorm; Gemma's is pre_feedforward_layernorm.
_NORMS = (
    in_layer("self_attention.linear_proj.post_norm.weight", "post_attention_layernorm.weight [hidden]"),
    in_layer("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight [hidden]"),
    in_layer("mlp.linear_fc2.post_norm.weight", "post_feedforward_layernorm.weight [hidden]"),
)
_MATRICES = tuple(entry for entry in MLP if entry.axis is not None)


def read(raw: dict[str, Any]) -> ModelShape:
    """Sizes from the contents of a config.json, as transformers 4 or 5 spells them.

    Raises:
        ValueError: one of the model's options has no support, or a size is missing or invalid.
    """
    for key in _REFUSED:
        if raw.get(key):
            raise ValueError(f"{key}={shown(raw[key])} is not supported for gemma3")
    if raw.get("hidden_activation", _ACTIVATION) != _ACTIVATION:
        raise ValueError(f"hidden_activation={shown(raw['hidden_activation'])} is not supported; only {_ACTIVATION} is")
    given = {**_DEFAULTS, **raw}
    local_theta, global_rope = _ropes(given)
    # Gemma reads hidden_activation and ignores Llama's hidden_act.
    as_dense = {key: value for key, value in given.items() if key != "hidden_act"} | {"rope_parameters": global_rope}
    shape = replace(
        read_dense(as_dense, "gemma3", qk_norm=True),
        zero_centered_norms=True,
        post_norms=True,
        activation="gelu_tanh",
        softmax_scale=number(given, "query_pre_attn_scalar", 256.0) ** -0.5,
    )
    windowed = _windowed(given, shape.layers)
    return replace(
        shape,
        embedding_scale=shape.hidden**0.5,
        window=size(given, "sliding_window") if any(windowed) else None,
        windowed=windowed,
        local_rope_theta=local_theta,
    )


def _windowed(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """[layers]: whether a layer has a window."""
    types = raw.get("layer_types")
    if types is None:
        # Every n-th layer has no window.
        pattern = size(raw, "sliding_window_pattern", size(raw, "_sliding_window_pattern", 6))
        return tuple((layer + 1) % pattern > 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_LOCAL, _GLOBAL}:
        raise ValueError(f"layer_types={shown(types)} must name {_LOCAL} or {_GLOBAL} for each of {layers} layers")
    return tuple(one == _LOCAL for one in types)


def _ropes(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """rope_theta of the layers with a window, and the rotary settings of the others."""
    by_type = section(raw, "rope_parameters")
    if by_type and not {_LOCAL, _GLOBAL} & by_type.keys():
        raise ValueError(f"rope_parameters={shown(dict(by_type))} must have {_LOCAL} and {_GLOBAL}")
    local = section(by_type, _LOCAL)
    if local.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type={shown(local['rope_type'])} of {_LOCAL} is not supported; only default is")
    everywhere = {**section(by_type, _GLOBAL), **section(raw, "rope_scaling")}
    theta = number(everywhere, "rope_theta", number(raw, "rope_theta", 1.0))
    return number(local, "rope_theta", number(raw, "rope_local_base_freq", 1.0)), {**everywhere, "rope_theta": theta}


FAMILY = Family(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    read=read,
    layers=lambda shape: ATTENTION + QK_NORM + _NORMS + _MATRICES,
    reward_prefix="Gemma3Text",
)
