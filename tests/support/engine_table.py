"""vLLM's parameters of twelve families, written out: the table that tracing its loaders replaced, as an oracle.

It knows vLLM's names, joined matrices, copies of key/value heads and padded vocabularies, and nothing of its code.
"""

from collections.abc import Iterator

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard, Split
from megatron_grpo.models.weight_map import HFTensor, WeightEntry, iter_entries
from megatron_grpo.planning.engine_shards import split_engine
from megatron_grpo.weight_sync.boxes import Box, BoxLayout, Function, Range, count_elements

FAMILIES = ("qwen2", "qwen3", "llama", "gemma3", "qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v32")
VOCABULARY_MULTIPLE = 64
COMPRESSED = ("q_a_proj", "kv_a_proj_with_mqa")
"""Matrices that vLLM joins when queries are compressed too."""
INDEX = ("wk", "weights_proj")  # matrices of an indexer that vLLM joins


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
    if shape.indexer is not None and entry.hf[0].name.endswith(f".{INDEX[1]}.weight"):
        row = shape.indexer.head_dim
    for tensor in entry.hf:
        name = tensor.name.format(layer=layer, expert=expert)
        sizes = tensor.measure(shape.sizes)
        part = [Range(0, size) for size in sizes]
        if entry.axis is not None:
            part[entry.axis] = find_part(entry.axis, tensor, shape, shard.find_split(entry))
        if (sections := list_sections(name, shape)) and entry.axis is not None:
            for begin, dim, size in sections:
                cut = cut_heads(size, dim, shape, shard.find_split(entry))
                rows, position = Range(begin + cut.begin, begin + cut.end), Range(row, row + cut.size)
                row += cut.size
                columns = part[1:]
                yield Box(name, name, BoxLayout((rows, *columns), (position, *columns), (0, 1)))
            continue
        if shape.family == "minimax_m2" and name.endswith(("q_norm.weight", "k_norm.weight")):
            part = [cut_heads(sizes[0], "groups * key" if "k_norm" in name else "", shape, shard.tensor)]
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
                yield Box(
                    name_parameter(entry, shape, name), "", BoxLayout((), padding, (-1, -1), (Function("full", 0.0),))
                )
        # Dimensions of one element do not say which dimension runs along them.
        order = [axis if axis >= 0 and part[axis].size > 1 else -1 for axis in order]
        if count_elements(tuple(part)):
            cut = BoxLayout(tuple(part), tuple(position), tuple(order))
            yield Box(name_parameter(entry, shape, name), name, cut)


def find_part(axis: int, tensor: HFTensor, shape: ModelShape, split: Split) -> Range:
    total = tensor.measure(shape.sizes)[axis]
    if tensor.dims[axis] == "vocab":
        width = -(-total // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // split.count
        return Range(min(split.index * width, total), min((split.index + 1) * width, total))
    return cut_heads(total, tensor.dims[axis], shape, split)


def list_sections(name: str, shape: ModelShape) -> list[tuple[int, str, int]]:
    """First row, kind and rows of each section of a matrix that is joined in the checkpoint already."""
    if name.endswith("gate_up_proj.weight"):
        return [(0, "ffn", shape.ffn_hidden), (shape.ffn_hidden, "ffn", shape.ffn_hidden)]
    if name.endswith("qkv_proj.weight"):
        queries, keys = shape.attention_heads * shape.head_dim, shape.key_value_heads * shape.head_dim
        return [(0, "", queries), (queries, "groups * key", keys), (queries + keys, "groups * value", keys)]
    return []


def cut_heads(total: int, dim: str, shape: ModelShape, split: Split) -> Range:
    """Cut rows, of heads perhaps, of which `total` are in the tensor."""
    heads = shape.key_value_heads
    is_copied = dim in ("groups * key", "groups * value")  # by ranks with the same head
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
    if last in INDEX:
        return f"{above}.wk_weights_proj.{kind}"
    if last in COMPRESSED and query_rank(shape):
        return f"{above}.fused_qkv_a_proj.{kind}"
    return name


def query_rank(shape: ModelShape) -> int:
    return (shape.latent.query_rank or 0) if shape.latent is not None else 0
