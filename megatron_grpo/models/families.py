"""Which table belongs to which model family."""

from __future__ import annotations

from collections.abc import Callable

from megatron_grpo.config.model_shape import Family, ModelShape
from megatron_grpo.models import llama, qwen2, qwen3
from megatron_grpo.models.value_head import with_value_head
from megatron_grpo.models.weight_map import WeightEntry

_TABLES: dict[Family, Callable[[bool], tuple[WeightEntry, ...]]] = {
    "llama": llama.entries,
    "qwen2": qwen2.entries,
    "qwen3": qwen3.entries,
}


def weight_entries(shape: ModelShape) -> tuple[WeightEntry, ...]:
    """The weight map of a model, in the order in which tensors are exported."""
    entries = _TABLES[shape.family](shape.tied_embeddings)
    return entries if shape.value_head is None else with_value_head(entries, shape)
