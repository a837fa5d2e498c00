"""Which matrices vLLM keeps in FP8 with a scale for each block, and whether ranks cut them between blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_grpo.models.families import weight_entries
from megatron_grpo.models.places import Place
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.vllm_weights import landings
from megatron_grpo.models.weight_map import WeightEntry, WeightSlice, is_per_layer

BLOCK = 128
"""Rows, and columns, that share a scale; the last ones of a tensor may be fewer."""
_ROUTING = {"experts", "score"}
"""Dimensions of what chooses and weighs experts, which stays as it is."""


def in_fp8_blocks(entry: WeightEntry) -> bool:
    """Whether the tensors of an entry are matrices that vLLM's layers multiply by: no embedding, head, norm or bias."""
    return is_per_layer(entry.megatron[0]) and all(
        len(tensor.dims) == 2 and not _ROUTING & set(tensor.dims) for tensor in entry.hf
    )


def cut_blocks(shape: ModelShape, sources: Sequence[Place], engine: Sequence[Place]) -> Iterator[str]:
    """The matrices that some rank begins or ends inside a block, and where; for a message to people.

    Args:
        shape: sizes of the model.
        sources: places of the ranks that train.
        engine: places of the ranks of an engine.
    """
    for entry in filter(in_fp8_blocks, weight_entries(shape)):
        expert = engine[0].experts[0] if entry.per_expert else 0
        trained = {(place.expert_tensor if entry.per_expert else place.tensor) for place in sources}
        for part in sorted(trained, key=lambda part: part.index):
            for held in entry.slices(shape, 0, part.index, part.count, expert):
                if _inside(held):
                    yield f"{held.name} on policy ranks: {held.start} to {held.stop} of {held.shape}"
        for number, place in enumerate(engine):
            first = place.experts[0] if entry.per_expert else 0
            for landing in landings(entry, shape, place, expert=first):
                kept = landing.part
                if _inside(kept) or landing.row % BLOCK:
                    yield f"{kept.name} on rank {number} of an engine: {kept.start} to {kept.stop} of {kept.shape}"


def _inside(part: WeightSlice) -> bool:
    """Whether a slice begins or ends inside a block."""
    if part.axis is None:
        return False
    return bool(part.start % BLOCK or (part.stop % BLOCK and part.stop != part.shape[part.axis]))
