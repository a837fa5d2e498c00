"""gpt-oss: attention sinks, a window in every second layer, biases, and experts with a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.family import Family
from megatron_grpo.models.families.llama import ATTENTION, INPUT_NORM, MLP_NORM, QKV_BIAS, read_dense
from megatron_grpo.models.families.mixtures import read_expert_count, read_top_k
from megatron_grpo.models.families.rotary import read_yarn_scale
from megatron_grpo.models.shape import ExpertShape, ModelShape, read_size

SINKS = "attention: self_attention.core_attention.softmax_offset [heads] = self_attn.sinks"
_OUTPUT_BIAS = "attention: self_attention.linear_proj.bias [hidden] = self_attn.o_proj.bias"
# The tensors of experts are transposed, and rows of gate and up alternate.
EXPERTS = """
    experts: mlp.router.weight [experts, hidden] = mlp.router.weight
    experts: mlp.router.bias [experts] = mlp.router.bias
    experts: mlp.experts.local_experts.{expert}.linear_fc1.weight [gate * expert_ffn | up * expert_ffn, hidden]
        = mlp.experts.gate_up_proj [expert, hidden, expert_ffn * (gate | up)]
    experts: mlp.experts.local_experts.{expert}.linear_fc1.bias [gate * expert_ffn | up * expert_ffn]
        = mlp.experts.gate_up_proj_bias [expert, expert_ffn * (gate | up)]
    experts: mlp.experts.local_experts.{expert}.linear_fc2.weight [hidden, expert_ffn]
        = mlp.experts.down_proj [expert, expert_ffn, hidden]
    experts: mlp.experts.local_experts.{expert}.linear_fc2.bias [hidden] = mlp.experts.down_proj_bias [expert, hidden]
"""
# transformers' defaults for keys that config.json lacks, where they differ from Llama's.
_DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
}
_ROTARY = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Keys that vLLM does not read, with the value that it always takes; transformers' default is the same.
_FIXED = {"rms_norm_eps": 1e-5, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_KINDS = ("sliding_attention", "full_attention")


def _read(raw: dict[str, Any]) -> ModelShape:
    for key, value in _FIXED.items():
        if raw.get(key, value) != value:
            raise ValueError(
                f"{key}={to_text(raw[key])} is not supported for gpt_oss: vLLM always takes {value}; write {value}, "
                "or leave the key out"
            )
    settings = {**_DEFAULTS, **raw}
    if raw.get("rope_parameters") is None:
        settings["rope_parameters"] = _ROTARY
    shape = read_dense(
        settings,
        "gpt_oss",
        rope_types=("yarn",),
        defaults=_DEFAULTS,
        options={"attention_bias": (True,), "tie_word_embeddings": (False,)},  # vLLM never ties the head
        windows=True,
        qkv_bias=True,
    )
    assert shape.rope_scaling is not None
    count = read_expert_count(raw, "num_experts", "num_local_experts", 128)
    experts = ExpertShape(
        packed=True,
        count=count,
        ffn_hidden=shape.ffn_hidden,
        top_k=read_top_k(settings, count),
        layers=(True,) * shape.layers,
        bias=True,
    )
    return replace(
        shape,
        attention_bias=True,
        sinks=True,
        activation="clamped_swiglu",
        softmax_scale=shape.head_dim**-0.5 * _read_yarn_scale(shape.rope_scaling) ** 2,
        window=read_size(settings, "sliding_window"),
        windowed=_list_windowed_layers(raw, shape.layers),
        experts=experts,
    )


def _read_yarn_scale(rope: Mapping[str, Any]) -> float:
    scale = read_yarn_scale(rope, "gpt_oss")
    for key in ("beta_fast", "beta_slow"):
        if rope.get(key) is None:
            raise ValueError(f"the rotary embedding has no {key}, which vLLM needs; add it, as in {_ROTARY[key]}")
    return scale


def _list_windowed_layers(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    windowed = tuple(layer % 2 == 0 for layer in range(layers))
    expected = [_KINDS[layer % 2] for layer in range(layers)]
    types = raw.get("layer_types")
    if types is not None and types != expected:
        raise ValueError(
            f"layer_types={to_text(types)} is not supported for gpt_oss: in vLLM layers alternate, "
            f"and the first of {layers} is {_KINDS[0]}; leave the key out"
        )
    return windowed


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    read=_read,
    tables=(INPUT_NORM, ATTENTION, QKV_BIAS, _OUTPUT_BIAS, SINKS, MLP_NORM, EXPERTS),
)
