"""Llama 2 and 3, Qwen2 (biases on queries, keys and values) and Qwen3 (norms on query and key heads).

Other families build on their sizes and weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_grpo.models.families.family import Family, ImageForm, VisionModel
from megatron_grpo.models.families.options import WINDOW, Neutral, refuse_options
from megatron_grpo.models.families.rotary import read_rotary, read_rotated_dim, read_yarn_scale
from megatron_grpo.models.shape import ModelShape, read_flag, read_number, read_size

_ROPE_TYPES = ("default", "linear", "llama3")

INPUT_NORM = "mixer: input_layernorm.weight [hidden] = input_layernorm.weight"
MLP_NORM = "mlp: pre_mlp_layernorm.weight [hidden] = post_attention_layernorm.weight"
ATTENTION = """
    attention: self_attention.linear_qkv.weight [groups * (query | key | value), hidden]
        = self_attn.q_proj.weight [groups * query, hidden]
        + self_attn.k_proj.weight [groups * key, hidden]
        + self_attn.v_proj.weight [groups * value, hidden]
    attention: self_attention.linear_proj.weight [hidden, groups * query] = self_attn.o_proj.weight
"""
QKV_BIAS = """
    qkv_bias: self_attention.linear_qkv.bias [groups * (query | key | value)]
        = self_attn.q_proj.bias [groups * query]
        + self_attn.k_proj.bias [groups * key]
        + self_attn.v_proj.bias [groups * value]
"""
QK_NORM = """
    qk_norm: self_attention.q_layernorm.weight [head_dim] = self_attn.q_norm.weight
    qk_norm: self_attention.k_layernorm.weight [head_dim] = self_attn.k_norm.weight
"""
MLP = """
    dense: mlp.linear_fc1.weight [gate * ffn | up * ffn, hidden]
        = mlp.gate_proj.weight [gate * ffn, hidden] + mlp.up_proj.weight [up * ffn, hidden]
    dense: mlp.linear_fc2.weight [hidden, ffn] = mlp.down_proj.weight
"""

MERGED_MLP = """
    dense: mlp.linear_fc1.weight [gate * ffn | up * ffn, hidden] = mlp.gate_up_proj.weight
    dense: mlp.linear_fc2.weight [hidden, ffn] = mlp.down_proj.weight
"""


def read_dense(
    raw: dict[str, Any],
    family: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    nullable: tuple[str, ...] = (),
    options: Neutral | None = None,
    windows: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    rotated: float | None = None,
    rope_types: tuple[str, ...] = _ROPE_TYPES,
) -> ModelShape:
    """Read a dense decoder's sizes as transformers 5 and vLLM do.

    Args:
        defaults: transformers' values of keys that the file lacks, where they differ from `_DEFAULTS`.
        nullable: keys from which transformers derives a value when they are null.
        options: options that the family lacks, beyond those of `refuse_options`.
        windows: whether layers may have windows, which the caller reads.
        rotated: share of a head that is rotated if the file does not say it; None: it has to be all.

    Raises:
        ValueError: one of the model's options has no support, or a size is missing or invalid.
    """
    refuse_options(raw, family, options, windows, is_partly_rotated=rotated is not None)
    default_values = {**_DEFAULTS, **(defaults or {})}
    settings = {**default_values, **raw}
    raw = {key: value for key, value in settings.items() if value is not None or key not in nullable}
    theta, scaling = read_rotary(raw, rope_types, default_values["rope_theta"], is_partial=rotated is not None)
    heads = read_size(raw, "num_attention_heads")
    key_value_heads = read_size(raw, "num_key_value_heads", heads)
    if heads % key_value_heads:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={key_value_heads}")
    hidden = read_size(raw, "hidden_size")
    head_dim = read_size(raw, "head_dim", max(hidden // heads, 1))
    return ModelShape(
        family=family,
        layers=read_size(raw, "num_hidden_layers"),
        hidden=hidden,
        ffn_hidden=read_size(raw, "intermediate_size"),
        attention_heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        vocab=read_size(raw, "vocab_size"),
        tied_embeddings=read_flag(raw, "tie_word_embeddings", default=False),
        norm_eps=read_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=read_size(raw, "max_position_embeddings"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        rotated_dim=None if rotated is None else read_rotated_dim(raw, head_dim, rotated),
    )


def read_qwen(raw: dict[str, Any], family: str, **settings: Any) -> ModelShape:
    """Read sizes as `read_dense` does; positions may be stretched by YaRN."""
    shape = read_dense(raw, family, rope_types=(*_ROPE_TYPES, "yarn"), **settings)
    if shape.rope_scaling is None or shape.rope_scaling["rope_type"] != "yarn":
        return shape
    # Both rotated vectors have YaRN's factor, so their product has its square.
    return replace(shape, softmax_scale=shape.head_dim**-0.5 * read_yarn_scale(shape.rope_scaling, family) ** 2)


# transformers' values of keys that a Llama's config.json lacks.
_DEFAULTS = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
QWEN_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_QWEN3_DEFAULTS = {**QWEN_DEFAULTS, "head_dim": 128}
_KEY_VALUE_HEADS = ("num_key_value_heads",)
_QWEN2_5_VL_DEFAULTS = {
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "mrope_section": (16, 24, 24),
    "image_token_id": 151655,
    "video_token_id": 151656,
}
QWEN3_VL_IMAGES = ImageForm(
    placeholders=("image_token_id", "video_token_id"),
    defaults={
        "rope_theta": 500000.0,
        "max_position_embeddings": 128000,
        "mrope_section": (24, 20, 20),
        "image_token_id": 151655,
        "video_token_id": 151656,
    },
    takes_turns=True,
    levels=(8, 16, 24),
)


FAMILIES = (
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        read=partial(
            read_qwen,
            family="qwen3",
            qk_norm=True,
            defaults=_QWEN3_DEFAULTS,
            nullable=_KEY_VALUE_HEADS,
        ),
        tables=(INPUT_NORM, ATTENTION, QK_NORM, MLP_NORM, MLP),
        vision=VisionModel(
            architecture="Qwen3VLForConditionalGeneration",
            model_type="qwen3_vl",
            parts=("visual.",),
            text_model_type="qwen3_vl_text",
            images=QWEN3_VL_IMAGES,
        ),
    ),
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        read=partial(
            read_qwen,
            family="qwen2",
            qkv_bias=True,
            defaults=QWEN_DEFAULTS,
            nullable=_KEY_VALUE_HEADS,
        ),
        tables=(INPUT_NORM, ATTENTION, QKV_BIAS, MLP_NORM, MLP),
        vision=VisionModel(
            architecture="Qwen2_5_VLForConditionalGeneration",
            model_type="qwen2_5_vl",
            parts=("visual.",),
            text_model_type="qwen2_5_vl_text",
            is_flat=True,
            text_prefix="",
            images=ImageForm(placeholders=("image_token_id", "video_token_id"), defaults=_QWEN2_5_VL_DEFAULTS),
        ),
    ),
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        read=partial(read_dense, family="llama", nullable=("head_dim", *_KEY_VALUE_HEADS), options=WINDOW),
        tables=(INPUT_NORM, ATTENTION, MLP_NORM, MLP),
    ),
)
