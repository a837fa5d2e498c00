"""Gemma 4 (text): own head sizes in layers without a window, and experts beside the dense network in the mixture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import Family, VisionModel
from megatron_grpo.models.families.llama import ATTENTION, INPUT_NORM, MLP, QK_NORM, read_dense
from megatron_grpo.models.families.rotary import read_rotary_by_kind
from megatron_grpo.models.shape import (
    ExpertShape,
    HeadShape,
    ModelShape,
    read_flag,
    read_number,
    read_section,
    read_size,
)

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_ACTIVATION = "gelu_pytorch_tanh"
# transformers' defaults for keys that config.json lacks, where they differ from Llama's.
_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
_ROPE = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    _GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
# Options of the smaller released models (E2B, E4B), and values with which they change nothing.
_SMALL_MODELS: Mapping[str, tuple[Any, int]] = {
    "hidden_size_per_layer_input": (0, 256),
    "num_kv_shared_layers": (0, 0),
}
_CAP = "final_logit_softcapping"
# Keys that are read here, and that mean something else to `read_dense`.
_SET_ASIDE = ("hidden_act", "rope_parameters", "per_layer_config")

_GLOBAL_ATTENTION = """
    own_value: self_attention.linear_qkv.weight [global_groups * (global_query | global_key | global_value), hidden]
        = self_attn.q_proj.weight [global_groups * global_query, hidden]
        + self_attn.k_proj.weight [global_groups * global_key, hidden]
        + self_attn.v_proj.weight [global_groups * global_value, hidden]
    key_as_value: self_attention.linear_qkv.weight [global_groups * (global_query | global_key), hidden]
        = self_attn.q_proj.weight [global_groups * global_query, hidden]
        + self_attn.k_proj.weight [global_groups * global_key, hidden]
    global: self_attention.linear_proj.weight [hidden, global_groups * global_query] = self_attn.o_proj.weight
    global: self_attention.q_layernorm.weight [global_head_dim] = self_attn.q_norm.weight
    global: self_attention.k_layernorm.weight [global_head_dim] = self_attn.k_norm.weight
"""
_POST_NORM = "mixer: self_attention.linear_proj.post_norm.weight [hidden] = post_attention_layernorm.weight"
_NORMS = """
    dense: pre_mlp_layernorm.weight [hidden] = pre_feedforward_layernorm.weight
    dense: mlp.linear_fc2.post_norm.weight [hidden] = post_feedforward_layernorm.weight
    experts: mlp.dense_norm.weight [hidden] = pre_feedforward_layernorm.weight
    experts: mlp.dense_post_norm.weight [hidden] = post_feedforward_layernorm_1.weight
    experts: mlp.expert_norm.weight [hidden] = pre_feedforward_layernorm_2.weight
    experts: mlp.expert_post_norm.weight [hidden] = post_feedforward_layernorm_2.weight
    experts: mlp.post_norm.weight [hidden] = post_feedforward_layernorm.weight
"""
_EXPERTS = """
    experts: mlp.router.weight [experts, hidden] = router.proj.weight
    experts: mlp.router.norm.weight [hidden] = router.scale
    experts: mlp.router.per_expert_scale [experts] = router.per_expert_scale
    experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [gate * expert_ffn | up * expert_ffn, hidden]
        = experts.gate_up_proj [expert, gate * expert_ffn | up * expert_ffn, hidden]
    experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [hidden, expert_ffn]
        = experts.down_proj [expert, hidden, expert_ffn]
    experts: mlp.shared_experts.linear_fc1.weight [gate * shared_ffn | up * shared_ffn, hidden]
        = mlp.gate_proj.weight [gate * shared_ffn, hidden] + mlp.up_proj.weight [up * shared_ffn, hidden]
    experts: mlp.shared_experts.linear_fc2.weight [hidden, shared_ffn] = mlp.down_proj.weight
"""
_SCALAR = "mlp: layer_scalar [scalar] = layer_scalar"


def _read(raw: dict[str, Any]) -> ModelShape:
    for key, (neutral, default) in _SMALL_MODELS.items():
        if raw.get(key, default) != neutral:
            raise ValueError(
                f"{key}={to_text(raw.get(key, default))} is not supported for gemma4; only {neutral} is, "
                "as in gemma-4-31B and gemma-4-26B-A4B"
            )
    if raw.get("hidden_activation", _ACTIVATION) != _ACTIVATION:
        raise ValueError(
            f"hidden_activation={to_text(raw['hidden_activation'])} is not supported; only {_ACTIVATION} is"
        )
    if raw.get("use_bidirectional_attention") not in (None, "vision"):  # "vision" is of tokens of images
        raise ValueError(
            f"use_bidirectional_attention={to_text(raw['use_bidirectional_attention'])} is not supported for gemma4; "
            "only null and vision are"
        )
    as_dense = {key: value for key, value in (_DEFAULTS | raw).items() if key not in _SET_ASIDE}
    local_theta, theta, rotated_share = _read_rotary(raw)
    as_dense["rope_theta"] = theta
    shape = read_dense(as_dense, "gemma4", qk_norm=True, windows=True, options={"attn_logit_softcapping": (None,)})
    windowed = _list_windowed_layers(raw, shape.layers)
    experts = _read_experts(raw, shape)
    return replace(
        shape,
        post_norms=True,
        activation="gelu_tanh",
        softmax_scale=1.0,
        embedding_scale=shape.hidden**0.5,
        rope_scaling={"rope_type": "proportional", "partial_rotary_factor": rotated_share},
        local_rope_theta=local_theta,
        window=read_size(raw, "sliding_window", 512) if any(windowed) else None,
        windowed=windowed,
        global_heads=_read_global_heads(raw, shape, windowed),
        value_norm=True,
        layer_scale=True,
        logit_cap=None if raw.get(_CAP) is None else read_number(raw, _CAP, 0.0),
        experts=experts,
    )


def _read_rotary(raw: Mapping[str, Any]) -> tuple[float, float, float]:
    """Read both rope_theta, and the share of a global head that is rotated."""
    if raw.get("rope_scaling") is not None:
        raise ValueError("rope_scaling is not supported for gemma4; write rope_parameters, which transformers reads")
    by_kind = _ROPE if raw.get("rope_parameters") is None else read_section(raw, "rope_parameters")
    for kind in _ROPE:
        if "rope_theta" not in read_section(by_kind, kind):
            raise ValueError(f"rope_parameters={to_text(dict(by_kind))} must have rope_theta of {kind}")
    local_theta, rope = read_rotary_by_kind({"rope_parameters": by_kind}, _LOCAL, _GLOBAL, {_LOCAL: 1e4, _GLOBAL: 1e6})
    if rope["rope_type"] != "proportional":
        raise ValueError(f"rope_type={to_text(rope['rope_type'])} of {_GLOBAL} is not supported; only proportional is")
    if rope.get("factor", 1) != 1:
        raise ValueError(f"factor={to_text(rope['factor'])} of {_GLOBAL} is not supported: vLLM ignores it; remove it")
    share = read_number(rope, "partial_rotary_factor", 1.0)
    if share > 1.0:
        raise ValueError(f"partial_rotary_factor={to_text(share)} must be 1 or less")
    return local_theta, float(rope["rope_theta"]), share


def _list_windowed_layers(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = raw.get("layer_types")
    if types is None:  # every sixth layer has no window, and nor has the last
        return tuple((layer + 1) % 6 > 0 and layer < layers - 1 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_LOCAL, _GLOBAL}:
        raise ValueError(f"layer_types={to_text(types)} must name {_LOCAL} or {_GLOBAL} for each of {layers} layers")
    if types[-1] != _GLOBAL:
        raise ValueError(f"layer_types ends in {_LOCAL}, which transformers replaces by {_GLOBAL}; write {_GLOBAL}")
    return tuple(kind == _LOCAL for kind in types)


def _read_global_heads(raw: Mapping[str, Any], shape: ModelShape, windowed: tuple[bool, ...]) -> HeadShape:
    # transformers 5.19 writes sizes by layer, in place of the released files' keys of all these layers.
    key_is_value = read_flag(raw, "attention_k_eq_v", default=False)
    head_sizes: Mapping[str, Any] = {"head_dim": read_size(raw, "global_head_dim", 512)}
    if key_is_value and raw.get("num_global_key_value_heads") is not None:
        head_sizes = {**head_sizes, "num_key_value_heads": raw["num_global_key_value_heads"]}
    by_number = {number.lstrip("0") or "0": sizes for number, sizes in read_section(raw, "per_layer_config").items()}
    if by_number:
        without = [str(layer) for layer, has_window in enumerate(windowed) if not has_window]
        head_sizes = read_section(by_number, without[0])
        if any(by_number.get(layer) != head_sizes for layer in without) or len(by_number) != len(without):
            raise ValueError(
                f"per_layer_config={to_text(by_number)} is not supported; "
                f"it must have the same sizes for each layer of {_GLOBAL}, and no other layers"
            )
    if unknown := head_sizes.keys() - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"per_layer_config with {to_text(min(unknown))} is not supported; only sizes of heads are")
    heads = HeadShape(
        key_value_heads=read_size(head_sizes, "num_key_value_heads", shape.key_value_heads),
        head_dim=read_size(head_sizes, "head_dim", shape.head_dim),
        key_is_value=key_is_value,
    )
    if shape.attention_heads % heads.key_value_heads:
        raise ValueError(
            f"num_attention_heads={shape.attention_heads} is not a multiple of the {heads.key_value_heads} key/value "
            f"heads of {_GLOBAL}"
        )
    return heads


def _read_experts(raw: Mapping[str, Any], shape: ModelShape) -> ExpertShape | None:
    if not read_flag(raw, "enable_moe_block", default=False):
        if raw.get("num_experts") is not None:
            raise ValueError(
                f"num_experts={to_text(raw['num_experts'])} without enable_moe_block is not supported: "
                "vLLM would compute experts; remove it"
            )
        return None
    count, top_k = read_size(raw, "num_experts"), read_size(raw, "top_k_experts")
    if top_k > count:
        raise ValueError(f"top_k_experts={top_k} is more than the {count} experts")
    return ExpertShape(
        packed=True,
        count=count,
        ffn_hidden=read_size(raw, "moe_intermediate_size"),
        top_k=top_k,
        layers=(True,) * shape.layers,
        shared_ffn_hidden=shape.ffn_hidden,
        beside_dense=True,
    )


FAMILY = Family(
    name="gemma4",
    architecture="Gemma4ForCausalLM",
    has_reward_models=False,
    read=_read,
    tables=(
        INPUT_NORM,
        ATTENTION,
        QK_NORM,
        _GLOBAL_ATTENTION,
        _POST_NORM,
        _NORMS,
        MLP,
        _EXPERTS,
        _SCALAR,
    ),
    model_type="gemma4_text",
    vision=VisionModel(
        architecture="Gemma4ForConditionalGeneration",
        model_type="gemma4",
        parts=("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."),
        has_tied_head=True,
    ),
)
