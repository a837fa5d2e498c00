"""Qwen3-MoE: Qwen3's attention with a mixture of experts in place of the feed-forward network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import shown
from megatron_grpo.weights.families.experts import chosen_experts, expert_layer
from megatron_grpo.weights.families.family import Family, only_in
from megatron_grpo.weights.families.llama import ATTENTION, MLP, read_dense
from megatron_grpo.weights.families.qwen3 import QK_NORM
from megatron_grpo.weights.shape import ExpertShape, ModelShape, size

EXPERTS = expert_layer("mlp.", "gate_proj", "up_proj", "down_proj")


def _read(raw: dict[str, Any]) -> ModelShape:
    shape = read_dense(raw, "qwen3_moe", qk_norm=True)
    # transformers 5 writes the number of experts under another name than the released models have it.
    count = size(raw, "num_experts", size(raw, "num_local_experts", 128))
    # Every `decoder_sparse_step`-th layer that is not in `mlp_only_layers` has experts.
    step, dense = size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(one, int) for one in dense):
        raise ValueError(f"mlp_only_layers={shown(dense)} must be a list of numbers of layers")
    experts = ExpertShape(
        count=count,
        ffn_hidden=size(raw, "moe_intermediate_size"),
        top_k=chosen_experts(raw, count),
        layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(shape.layers)),
        normalised=bool(raw.get("norm_topk_prob", False)),
    )
    return replace(shape, experts=experts)


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    layers=lambda shape: ATTENTION + QK_NORM + only_in("dense", *MLP) + EXPERTS,
)
