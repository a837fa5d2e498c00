"""Mixtral: Llama's attention with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import shown
from megatron_grpo.weights.families.experts import chosen_experts, expert_layer
from megatron_grpo.weights.families.family import Family
from megatron_grpo.weights.families.llama import ATTENTION, read_dense
from megatron_grpo.weights.shape import ExpertShape, ModelShape, size

EXPERTS = expert_layer("block_sparse_moe.", "w1", "w3", "w2")


def _read(raw: dict[str, Any]) -> ModelShape:
    if raw.get("sliding_window") is not None:
        raise ValueError(f"sliding_window={shown(raw['sliding_window'])} is not supported for mixtral; only null is")
    shape = read_dense(raw, "mixtral")
    count = size(raw, "num_local_experts", 8)
    experts = ExpertShape(
        count=count, ffn_hidden=shape.ffn_hidden, top_k=chosen_experts(raw, count), layers=(True,) * shape.layers
    )
    return replace(shape, experts=experts)


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    layers=lambda shape: ATTENTION + EXPERTS,
)
