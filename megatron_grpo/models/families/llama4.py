"""Llama 4 (text): layers with chunks and without rotary embedding by turns, and experts that scale their input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import Family, VisionModel
from megatron_grpo.models.families.llama import ATTENTION, INPUT_NORM, MLP, MLP_NORM, read_dense
from megatron_grpo.models.shape import ExpertShape, ModelShape, QueryScale, read_flag, read_number, read_size

# transformers' defaults for keys that config.json lacks, where they differ from Llama's.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
_OPTIONS = {"sliding_window": (None,), "router_jitter_noise": (0, None), "attention_dropout": (0,)}
EXPERTS = """
    experts: mlp.router.weight [experts, hidden] = mlp.router.weight
    experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [gate * expert_ffn | up * expert_ffn, hidden]
        = mlp.experts.gate_up_proj [expert, hidden, gate * expert_ffn | up * expert_ffn]
    experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [hidden, expert_ffn]
        = mlp.experts.down_proj [expert, expert_ffn, hidden]
    experts: mlp.shared_experts.linear_fc1.weight [gate * shared_ffn | up * shared_ffn, hidden]
        = mlp.shared_expert.gate_proj.weight [gate * shared_ffn, hidden]
        + mlp.shared_expert.up_proj.weight [up * shared_ffn, hidden]
    experts: mlp.shared_experts.linear_fc2.weight [hidden, shared_ffn] = mlp.shared_expert.down_proj.weight
"""


def _read(raw: dict[str, Any]) -> ModelShape:
    # The dense layers' width has a key of its own; layer_types is compared below.
    as_dense = {key: value for key, value in raw.items() if key != "layer_types"}
    as_dense["intermediate_size"] = read_size(raw, "intermediate_size_mlp", 16384)
    shape = read_dense(as_dense, "llama4", defaults=_DEFAULTS, options=_OPTIONS)
    interval = read_size(raw, "no_rope_layer_interval", 4)
    rotated = [int((layer + 1) % interval > 0) for layer in range(shape.layers)]
    rotated = [int(flag) for flag in _read_list(raw, "no_rope_layers", (0, 1), shape.layers) or rotated]
    # transformers goes by layer_types, vLLM by no_rope_layers.
    types = ["chunked_attention" if flag else "full_attention" for flag in rotated]
    if _read_list(raw, "layer_types", ("chunked_attention", "full_attention"), shape.layers) not in (None, types):
        raise ValueError(
            "layer_types must be chunked_attention in rotated layers and full_attention in the others of "
            f"no_rope_layers={to_text(rotated)}: vLLM ignores it; remove it"
        )
    scale = None
    if read_flag(raw, "attn_temperature_tuning", default=True):
        scale = QueryScale(
            slope=read_number(raw, "attn_scale", 0.1), length=read_size(raw, "floor_scale", 8192), offset=1
        )
    if "attention_chunk_size" in raw and raw["attention_chunk_size"] is None:
        raise ValueError("attention_chunk_size=null is not supported; give the number, or leave it out for 8192")
    return replace(
        shape,
        window=read_size(raw, "attention_chunk_size", 8192) if any(rotated) else None,
        windowed=tuple(map(bool, rotated)),
        chunked=any(rotated),
        unrotated=tuple(not flag for flag in rotated),
        interleaved_rope=True,
        unweighted_qk_norm=read_flag(raw, "use_qk_norm", default=True),
        query_scale=scale,
        experts=_read_experts(raw, shape.layers),
    )


def _read_experts(raw: Mapping[str, Any], layers: int) -> ExpertShape | None:
    if read_size(raw, "num_experts_per_tok", 1) != 1:
        raise ValueError(
            f"num_experts_per_tok={to_text(raw['num_experts_per_tok'])} is not supported for llama4; only 1 is: "
            "Megatron-Core scales the input of one expert per token"
        )
    step = read_size(raw, "interleave_moe_layer_step", 1)
    numbers = [layer for layer in range(layers) if (layer + 1) % step == 0]
    listed = raw.get("moe_layers")
    if listed is not None and listed != numbers:  # transformers goes by moe_layers, vLLM by the step
        raise ValueError(
            f"moe_layers={to_text(listed)} is not every layer of interleave_moe_layer_step={step}, which vLLM goes by; "
            "remove it or change the step"
        )
    if not numbers:
        return None
    width = read_size(raw, "intermediate_size", 8192)
    return ExpertShape(
        packed=True,
        count=read_size(raw, "num_local_experts", 16),
        ffn_hidden=width,
        top_k=1,
        layers=tuple(layer in numbers for layer in range(layers)),
        shared_ffn_hidden=width,
        score="sigmoid",
        normalised=False,
        scales_input=True,
    )


def _read_list(raw: Mapping[str, Any], key: str, allowed: Sequence[Any], layers: int) -> list[Any] | None:
    """Read a list by layer; None: missing or empty."""
    values = raw.get(key)
    if values is None or values == []:
        return None
    if not isinstance(values, list) or len(values) != layers or any(value not in allowed for value in values):
        first, second = allowed
        raise ValueError(f"{key}={to_text(values)} must have {first} or {second} for each of {layers} layers")
    return values


FAMILY = Family(
    name="llama4",
    architecture="Llama4ForCausalLM",
    has_reward_models=False,
    read=_read,
    tables=(INPUT_NORM, ATTENTION, MLP_NORM, MLP, EXPERTS),
    renamed={"mlp.": "feed_forward."},
    model_type="llama4_text",
    vision=VisionModel(
        architecture="Llama4ForConditionalGeneration",
        model_type="llama4",
        parts=("vision_model.", "multi_modal_projector."),
        text_prefix="language_model.",
    ),
)
