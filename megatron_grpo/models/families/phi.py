"""Phi-3 and Phi-4: Llama with one matrix for queries, keys and values, and one for gate and up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import Family
from megatron_grpo.models.families.llama import INPUT_NORM, MERGED_MLP, MLP_NORM, read_dense
from megatron_grpo.models.shape import ModelShape, read_section, read_size

_ATTENTION = """
    attention: self_attention.linear_qkv.weight [groups * (query | key | value), hidden]
        = self_attn.qkv_proj.weight [groups * query | groups * key | groups * value, hidden]
    attention: self_attention.linear_proj.weight [hidden, groups * query] = self_attn.o_proj.weight
"""
# transformers' defaults for keys that config.json lacks, where they differ from Llama's.
_DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_ORIGINAL_LENGTH = "original_max_position_embeddings"


def _read(raw: dict[str, Any]) -> ModelShape:
    rope = read_section(raw, "rope_scaling", "rope_parameters")
    renamed = {key: "longrope" for key in ("type", "rope_type") if rope.get(key) == "su"}  # its first name
    length = read_size(raw, _ORIGINAL_LENGTH, 4096)  # transformers prefers this to that of the rotary settings
    shape = read_dense(
        {**raw, "rope_scaling": {**rope, **renamed}, _ORIGINAL_LENGTH: length},
        "phi3",
        rope_types=("default", "longrope"),
        defaults=_DEFAULTS,
        nullable=("num_key_value_heads",),
        rotated=1.0,
    )
    if shape.rope_scaling is not None:
        shape = _read_long_rope(shape, shape.rope_scaling, length)
    window = read_size(raw, "sliding_window") if raw.get("sliding_window") else None
    if window is None or window >= shape.max_positions:
        return shape
    return replace(shape, window=window, windowed=(True,) * shape.layers)


def _read_long_rope(shape: ModelShape, rope: Mapping[str, Any], length: int) -> ModelShape:
    """Read LongRoPE within the length of the first training, and refuse longer sequences.

    Beyond it transformers takes the long factors for a long sequence alone; vLLM takes them for all sequences if the
    engine is set up for a long one.
    """
    if shape.head_dim != shape.hidden // shape.attention_heads:
        raise ValueError(
            f"head_dim={shape.head_dim} is not hidden_size / num_attention_heads, "
            "by which transformers counts the factors of LongRoPE; leave head_dim out"
        )
    for key in ("short_factor", "long_factor"):
        factors, count = rope.get(key), (shape.rotated_dim or shape.head_dim) // 2
        if not isinstance(factors, list) or len(factors) != count or not all(map(_is_positive, factors)):
            raise ValueError(f"{key}={to_text(factors)} of the rotary embedding must be {count} numbers above 0")
    for key in ("short_mscale", "long_mscale"):
        if rope.get(key) is not None:
            raise ValueError(f"{key}={to_text(rope[key])} is not supported: transformers ignores it; remove it")
    factor = shape.max_positions / length
    scale = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    for key, derived in (("factor", factor), ("attention_factor", scale)):
        if rope.get(key) is not None and not (_is_positive(rope[key]) and math.isclose(rope[key], derived)):
            raise ValueError(f"{key}={to_text(rope[key])} is not supported: vLLM takes {derived:.6g}; remove it")
    scaling = {**rope, "factor": factor}
    return replace(shape, rope_scaling=scaling, max_positions=min(length, shape.max_positions))


def _is_positive(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < math.inf


FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    read=_read,
    tables=(INPUT_NORM, _ATTENTION, MLP_NORM, MERGED_MLP),
)
