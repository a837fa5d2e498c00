"""Qwen3-MoE: Qwen3's attention with a mixture of experts in place of the feed-forward network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.config.errors import shown
from megatron_grpo.weights.families.experts import chosen_experts, dense_and_expert_flops, expert_layer
from megatron_grpo.weights.families.family import Family, only_in
from megatron_grpo.weights.families.llama import ATTENTION, INPUT, MLP, OUTPUT_NORM, head, read_dense
from megatron_grpo.weights.families.qwen3 import QK_NORM
from megatron_grpo.weights.shape import ExpertShape, ModelShape, size

EXPERTS = expert_layer("mlp.", "gate_proj", "up_proj", "down_proj")


def _layers_with_experts(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have experts: every `decoder_sparse_step`-th that is not in `mlp_only_layers`.

    Raises:
        ValueError: one of the two keys is no such number or list.
    """
    step, dense = size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(one, int) for one in dense):
        raise ValueError(f"mlp_only_layers={shown(dense)} must be a list of numbers of layers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def _read(raw: dict[str, Any]) -> ModelShape:
    shape = read_dense(raw, "qwen3_moe", qk_norm=True)
    # transformers 5 writes the number of experts under another name than the released models have it.
    count = size(raw, "num_experts", size(raw, "num_local_experts", 128))
    experts = ExpertShape(
        count=count,
        ffn_hidden=size(raw, "moe_intermediate_size"),
        top_k=chosen_experts(raw, count),
        layers=_layers_with_experts(raw, shape.layers),
        normalised=bool(raw.get("norm_topk_prob", False)),
    )
    return replace(shape, experts=experts)


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    entries=lambda shape: (
        INPUT + ATTENTION + QK_NORM + only_in("dense", *MLP) + EXPERTS + OUTPUT_NORM + head(shape.tied_embeddings)
    ),
    forward_flops=dense_and_expert_flops,
)
