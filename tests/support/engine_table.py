"""vLLM's parameters of seven families, written out: the table that tracing its loaders replaced, as an oracle.

It knows vLLM's names, joined matrices, copies of key/value heads and padded vocabularies, and nothing of its code.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard, Split
from megatron_grpo.models.weight_map import HFTensor, WeightEntry, iter_entries
from megatron_grpo.planning.engine_shards import split_engine
from megatron_grpo.weight_sync.boxes import Box, Cut, Function, Range, count_elements

FAMILIES = ("qwen2", "qwen3", "llama", "gemma3", "qwen3_moe", "mixtral", "deepseek_v3")
VOCABULARY_MULTIPLE = 64
COMPRESSED = ("q_a_proj", "kv_a_proj_with_mqa")
"""Matrices that vLLM joins when queries are compressed too."""


def table_boxes(parallel: GenerationParallelConfig, shape: ModelShape) -> list[list[Box]]:
    """The boxes of an engine's ranks.

    Parameters that a pipeline stage keeps, but does not compute with, are left out.
    """
    return [list(rank_boxes(shape, shard)) for shard in split_engine(parallel, shape)]


def rank_boxes(shape: ModelShape, shard: RankShard) -> Iterator[Box]:
    entries = build_weight_map(shape)
    for entry, layer, _ in iter_entries(entries, shape, list(range(shape.layers))):
        if entry.copy or not shard.keeps(entry, layer):
            continue
        for expert in range(*shard.experts) if entry.per_expert else [0]:
            yield from entry_boxes(entry, shape, shard, layer, expert)


def entry_boxes(entry: WeightEntry, shape: ModelShape, shard: RankShard, layer: int, expert: int) -> Iterator[Box]:
    # Joined matrices lie below each other.
    row = query_rank(shape) if entry.hf[0].name.endswith(f".{COMPRESSED[1]}.weight") else 0
    for tensor in entry.hf:
        name = tensor.name.format(layer=layer, expert=expert)
        sizes = tensor.measure(shape.sizes)
        part = [Range(0, size) for size in sizes]
        if entry.axis is not None:
            part[entry.axis] = find_part(entry.axis, tensor, shape, shard.find_split(entry))
        position = [Range(row, row + part[0].size), *(Range(0, indices.size) for indices in part[1:])]
        order = list(range(len(part)))
        if entry.per_expert:
            slot = expert - shard.experts[0]
            position, order = [Range(slot, slot + 1), *position], [-1, *order]
        row += part[0].size
        if entry.hf[0].dims[0] == "vocab":
            split = shard.find_split(entry)
            width = -(-sizes[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // split.count
            if part[0].size < width:
                padding = Range(part[0].size, width), Range(0, sizes[1])
                yield Box(name_parameter(entry, shape, name), "", Cut((), padding, (-1, -1), (Function("full", 0.0),)))
        # Dimensions of one element do not say which dimension runs along them.
        order = [axis if axis >= 0 and part[axis].size > 1 else -1 for axis in order]
        if count_elements(tuple(part)):
            cut = Cut(tuple(part), tuple(position), tuple(order))
            yield Box(name_parameter(entry, shape, name), name, cut)


def find_part(axis: int, tensor: HFTensor, shape: ModelShape, split: Split) -> Range:
    total = tensor.measure(shape.sizes)[axis]
    if tensor.dims[axis] == "vocab":
        width = -(-total // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // split.count
        return Range(min(split.index * width, total), min((split.index + 1) * width, total))
    heads = shape.key_value_heads
    is_copied = tensor.dims[axis] in ("groups * key", "groups * value")  # by ranks with the same head
    if is_copied and split.count > heads:
        split = Split(split.index // (split.count // heads), heads)
    width = total // split.count
    return Range(split.index * width, (split.index + 1) * width)


def name_parameter(entry: WeightEntry, shape: ModelShape, name: str) -> str:
    module, _, kind = name.rpartition(".")
    if entry.per_expert:
        block = module[: module.index(".experts.")]
        return f"{block}.experts.routed_experts.{'w13' if len(entry.hf) == 2 else 'w2'}_{kind}"
    above, _, last = module.rpartition(".")
    if len(entry.hf) == 3:
        return f"{above}.qkv_proj.{kind}"
    if len(entry.hf) == 2:
        return f"{above}.gate_up_proj.{kind}"
    if last in COMPRESSED and query_rank(shape):
        return f"{above}.fused_qkv_a_proj.{kind}"
    return name


def query_rank(shape: ModelShape) -> int:
    return (shape.latent.query_rank or 0) if shape.latent is not None else 0
