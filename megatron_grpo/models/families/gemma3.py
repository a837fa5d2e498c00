"""Gemma-3 (text): windows in most layers, two rotary embeddings, and norms around attention and feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import Family, VisionModel
from megatron_grpo.models.families.llama import ATTENTION, INPUT_NORM, MLP, QK_NORM, read_dense
from megatron_grpo.models.families.rotary import read_rotary_by_kind
from megatron_grpo.models.shape import ModelShape, read_number, read_size

# transformers' defaults for keys that config.json lacks, where they differ from Llama's.
_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "vocab_size": 262208,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
_THETA = {LOCAL: 10000.0, GLOBAL: 1000000.0}  # transformers' defaults of rope_theta
_ACTIVATION = "gelu_pytorch_tanh"

# Llama's norm before the feed-forward network is post_attention_layernorm; Gemma's is pre_feedforward_layernorm.
_NORMS = """
    mixer: self_attention.linear_proj.post_norm.weight [hidden] = post_attention_layernorm.weight
    mlp: pre_mlp_layernorm.weight [hidden] = pre_feedforward_layernorm.weight
    mlp: mlp.linear_fc2.post_norm.weight [hidden] = post_feedforward_layernorm.weight
"""


def _read(raw: dict[str, Any]) -> ModelShape:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(key):
            raise ValueError(f"{key}={to_text(raw[key])} is not supported for gemma3")
    activation = raw.get("hidden_activation", _ACTIVATION)
    if activation != _ACTIVATION:
        raise ValueError(f"hidden_activation={to_text(activation)} is not supported; only {_ACTIVATION} is")
    settings = {**_DEFAULTS, **raw}
    local_theta, global_rope = read_rotary_by_kind(raw, LOCAL, GLOBAL, _THETA)
    # Gemma reads hidden_activation and ignores Llama's hidden_act.
    set_aside = ("hidden_act", "rope_scaling", "rope_theta")
    as_dense = {key: value for key, value in settings.items() if key not in set_aside}
    as_dense["rope_parameters"] = global_rope
    shape = replace(
        read_dense(as_dense, "gemma3", qk_norm=True, windows=True),
        zero_centered_norms=True,
        post_norms=True,
        activation="gelu_tanh",
        softmax_scale=read_number(settings, "query_pre_attn_scalar", 256.0) ** -0.5,
    )
    windowed = list_windowed_layers(settings, shape.layers)
    return replace(
        shape,
        embedding_scale=shape.hidden**0.5,
        window=read_size(settings, "sliding_window") if any(windowed) else None,
        windowed=windowed,
        local_rope_theta=local_theta,
    )


def list_windowed_layers(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """List which layers have the window, from layer_types or a pattern."""
    types = raw.get("layer_types")
    if types is None:
        # Every n-th layer has no window.
        pattern = read_size(raw, "sliding_window_pattern", 6)
        return tuple((layer + 1) % pattern > 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {LOCAL, GLOBAL}:
        raise ValueError(f"layer_types={to_text(types)} must name {LOCAL} or {GLOBAL} for each of {layers} layers")
    return tuple(kind == LOCAL for kind in types)


FAMILY = Family(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    read=_read,
    tables=(INPUT_NORM, ATTENTION, QK_NORM, _NORMS, MLP),
    model_type="gemma3_text",
    vision=VisionModel(
        architecture="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        parts=("vision_tower.", "multi_modal_projector."),
        text_prefix="language_model.",
        has_tied_head=True,
    ),
    reward_prefix="Gemma3Text",
)
