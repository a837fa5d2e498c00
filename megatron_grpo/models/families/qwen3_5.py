"""Qwen3-Next, Qwen3.5 and 3.6: a gated delta net in most layers, attention with gated outputs in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import Family, VisionModel
from megatron_grpo.models.families.llama import INPUT_NORM, MLP, MLP_NORM, QK_NORM, read_dense
from megatron_grpo.models.families.mixtures import list_sparse_layers, read_top_k
from megatron_grpo.models.families.options import WINDOW, Neutral
from megatron_grpo.models.families.rotary import split_partial_rotation
from megatron_grpo.models.shape import DeltaShape, ExpertShape, ModelShape, read_flag, read_size

_DELTA, _ATTENTION = "linear_attention", "full_attention"
_QKV = "q * key_heads * key_dim | k * key_heads * key_dim | v * key_heads * per_key * value_dim"
_REST = "z * key_heads * per_key * value_dim | b * key_heads * per_key | a * key_heads * per_key"

DELTA = f"""
    delta: self_attention.in_proj.weight [{_QKV} | {_REST}, hidden]
        = linear_attn.in_proj_qkv.weight [{_QKV}, hidden]
        + linear_attn.in_proj_z.weight [z * key_heads * per_key * value_dim, hidden]
        + linear_attn.in_proj_b.weight [b * key_heads * per_key, hidden]
        + linear_attn.in_proj_a.weight [a * key_heads * per_key, hidden]
"""
# Qwen3-Next has the rows of a key head together.
DELTA_BY_KEY_HEAD = f"""
    delta: self_attention.in_proj.weight [{_QKV} | {_REST}, hidden]
        = linear_attn.in_proj_qkvz.weight
            [key_heads * (q * key_dim | k * key_dim | v * per_key * value_dim | z * per_key * value_dim), hidden]
        + linear_attn.in_proj_ba.weight [key_heads * (b * per_key | a * per_key), hidden]
"""
DELTA_REST = f"""
    delta: self_attention.conv1d.weight [{_QKV}, channel, kernel] = linear_attn.conv1d.weight
    delta: self_attention.dt_bias [key_heads * per_key] = linear_attn.dt_bias
    delta: self_attention.A_log [key_heads * per_key] = linear_attn.A_log
    delta: self_attention.out_norm.weight [value_dim] = linear_attn.norm.weight
    delta: self_attention.out_proj.weight [hidden, key_heads * per_key * value_dim] = linear_attn.out_proj.weight
"""
GATED_ATTENTION = """
    attention: self_attention.linear_qkv.weight
            [groups * (q * per_group * head_dim | gate * per_group * head_dim | key | value), hidden]
        = self_attn.q_proj.weight [groups * per_group * (q * head_dim | gate * head_dim), hidden]
        + self_attn.k_proj.weight [groups * key, hidden]
        + self_attn.v_proj.weight [groups * value, hidden]
    attention: self_attention.linear_proj.weight [hidden, groups * query] = self_attn.o_proj.weight
"""
# Qwen3.5's released folders have packed experts, Qwen3-Next's and those that transformers writes single ones.
EXPERTS = """
    experts: mlp.router.weight [experts, hidden] = mlp.gate.weight
    packed_experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [gate * expert_ffn | up * expert_ffn, hidden]
        = mlp.experts.gate_up_proj [expert, gate * expert_ffn | up * expert_ffn, hidden]
    packed_experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [hidden, expert_ffn]
        = mlp.experts.down_proj [expert, hidden, expert_ffn]
    single_experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [gate * expert_ffn | up * expert_ffn, hidden]
        = mlp.experts.{expert}.gate_proj.weight [gate * expert_ffn, hidden]
        + mlp.experts.{expert}.up_proj.weight [up * expert_ffn, hidden]
    single_experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [hidden, expert_ffn]
        = mlp.experts.{expert}.down_proj.weight
    experts: mlp.shared_experts.linear_fc1.weight [gate * shared_ffn | up * shared_ffn, hidden]
        = mlp.shared_expert.gate_proj.weight [gate * shared_ffn, hidden]
        + mlp.shared_expert.up_proj.weight [up * shared_ffn, hidden]
    experts: mlp.shared_experts.linear_fc2.weight [hidden, shared_ffn] = mlp.shared_expert.down_proj.weight
    experts: mlp.shared_experts.gate_weight [score, hidden] = mlp.shared_expert_gate.weight
"""

# transformers' values of keys that config.json lacks.
_DEFAULTS = {"head_dim": 256, "max_position_embeddings": 32768}
_DELTA_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# vLLM reads them, transformers always computes as with the first value.
_OPTIONS: Neutral = {**WINDOW, "attn_output_gate": (True,), "layer_scale": (False, None)}
_MIXTURE_OPTIONS: Neutral = {**_OPTIONS, "norm_topk_prob": (True,), "mlp_only_layers": ([], None)}


def _read(raw: dict[str, Any], family: str, options: Neutral = _OPTIONS, key_value_heads: int = 4) -> ModelShape:
    rest, share = split_partial_rotation(raw, 0.25)
    # Text has the same position in time, height and width, so the sections of a head for each change nothing.
    if rope := rest.get("rope_parameters"):
        images = ("mrope_section", "mrope_interleaved")
        rest["rope_parameters"] = {key: value for key, value in rope.items() if key not in images}
    shape = read_dense(
        {key: value for key, value in rest.items() if key != "layer_types"},
        family,
        qk_norm=True,
        rope_types=("default",),
        defaults={**_DEFAULTS, "num_key_value_heads": key_value_heads},
        options=options,
    )
    rotated = int(shape.head_dim * share)
    if rotated < 2 or rotated % 2:
        raise ValueError(
            f"partial_rotary_factor={share:g} of head_dim={shape.head_dim} rotates {rotated} features; "
            "only an even number is supported"
        )
    delta_layers = _list_delta_layers(raw, shape.layers)
    return replace(
        shape,
        zero_centered_norms=True,
        output_gate=True,
        rotated_dim=rotated,
        delta=_read_delta(raw) if any(delta_layers) else None,
        delta_layers=delta_layers,
    )


def _list_delta_layers(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = raw.get("layer_types")
    if types is None:  # every n-th layer has attention
        interval = read_size(raw, "full_attention_interval", 4)
        return tuple((layer + 1) % interval > 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {_DELTA, _ATTENTION}:
        raise ValueError(f"layer_types={to_text(types)} must name {_DELTA} or {_ATTENTION} for each of {layers} layers")
    return tuple(kind == _DELTA for kind in types)


def _read_delta(raw: Mapping[str, Any]) -> DeltaShape:
    sizes = {key: read_size({key: raw.get(key, default)}, key) for key, default in _DELTA_DEFAULTS.items()}
    key_heads, value_heads, key_dim, value_dim, kernel = sizes.values()
    if value_heads % key_heads:
        text = f"linear_num_value_heads={value_heads} is not a multiple of linear_num_key_heads={key_heads}"
        raise ValueError(text)
    return DeltaShape(key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, kernel=kernel)


def _read_experts(raw: Mapping[str, Any], layers: tuple[bool, ...], *, count: int, packed: bool) -> ExpertShape:
    count = read_size(raw, "num_experts", count)
    return ExpertShape(
        count=count,
        ffn_hidden=read_size(raw, "moe_intermediate_size", 512),
        top_k=read_top_k(raw, count),
        layers=layers,
        shared_ffn_hidden=read_size(raw, "shared_expert_intermediate_size", 512),
        shared_gate=True,
        packed=packed,
    )


def _read_qwen3_5_moe(raw: dict[str, Any]) -> ModelShape:
    # No layer is dense, so there is no dense width; a mixture's layers do not read it.
    with_width = {**raw, "intermediate_size": raw.get("moe_intermediate_size", 512)}
    shape = _read(with_width, "qwen3_5_moe", _MIXTURE_OPTIONS, key_value_heads=2)
    experts = _read_experts(raw, (True,) * shape.layers, count=256, packed=True)
    return replace(shape, experts=experts)


def _read_qwen3_next(raw: dict[str, Any]) -> ModelShape:
    options = {**_OPTIONS, "tie_word_embeddings": (False,)}  # vLLM never ties the head
    shape = _read({"intermediate_size": 5632, **raw}, "qwen3_next", options, key_value_heads=2)
    experts = _read_experts(raw, list_sparse_layers(raw, shape.layers), count=512, packed=False)
    return replace(shape, experts=replace(experts, normalised=read_flag(raw, "norm_topk_prob", default=True)))


_MIXER = (INPUT_NORM, DELTA, DELTA_REST, GATED_ATTENTION, QK_NORM, MLP_NORM)
_VISION = ("visual.",)

FAMILIES = (
    Family(
        name="qwen3_5",
        architecture="Qwen3_5ForCausalLM",
        read=partial(_read, family="qwen3_5"),
        tables=(*_MIXER, MLP),
        model_type="qwen3_5_text",
        vision=VisionModel(architecture="Qwen3_5ForConditionalGeneration", model_type="qwen3_5", parts=_VISION),
        has_further_predictions=True,
        proposes_tokens=True,
        reward_prefix="Qwen3_5Text",
    ),
    Family(
        name="qwen3_5_moe",
        architecture="Qwen3_5MoeForCausalLM",
        has_reward_models=False,
        read=_read_qwen3_5_moe,
        tables=(*_MIXER, EXPERTS),
        model_type="qwen3_5_moe_text",
        vision=VisionModel(architecture="Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe", parts=_VISION),
        has_further_predictions=True,
        proposes_tokens=True,
    ),
    Family(
        name="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        read=_read_qwen3_next,
        tables=(INPUT_NORM, DELTA_BY_KEY_HEAD, DELTA_REST, GATED_ATTENTION, QK_NORM, MLP_NORM, MLP, EXPERTS),
        has_further_predictions=True,
        proposes_tokens=True,
    ),
)
