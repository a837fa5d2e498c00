"""What an engine's ranks hold, assumed without vLLM: layers, parts of matrices, experts, and boxes of tensors."""

from __future__ import annotations

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard, Split, list_engine_stages
from megatron_grpo.models.weight_map import HFTensor, WeightEntry, index_tensors
from megatron_grpo.weight_sync.boxes import Box, BoxLayout, count_elements
from megatron_grpo.weight_sync.pieces import find_ranges


def split_engine(parallel: GenerationParallelConfig, shape: ModelShape, *, has_draft: bool = False) -> list[RankShard]:
    """Split the model over an engine's ranks, in vLLM's order.

    `has_draft`: the last stage has its last layer twice, for a layer of the same size that proposes tokens (MTP). It
    lacks that layer's matrix [hidden, 2 hidden], which joins an embedding and a hidden state.
    """
    tensor, stages, has_expert_parallelism = parallel.tensor, parallel.pipeline, parallel.expert > 1
    count = shape.experts.count if shape.experts is not None else 1
    # Each rank has consecutive experts; if there is a remainder, the first ranks have one more each.
    quotient, remainder = divmod(count, tensor)
    bounds = [rank * quotient + min(rank, remainder) for rank in range(tensor + 1)]
    shards = []
    for stage, layers in enumerate(list_engine_stages(shape.layers, stages)):
        draft = (shape.layers - 1,) if has_draft and stage == stages - 1 else ()
        shards += [
            RankShard(
                layers=(*layers, *draft),
                # A tied head is the embedding: the last stage has it too.
                has_embedding=stage == 0 or (shape.tied_embeddings and stage == stages - 1),
                has_output=stage == stages - 1,
                tensor=Split(rank, tensor),
                experts=(bounds[rank], bounds[rank + 1]) if has_expert_parallelism else (0, count),
                expert_tensor=Split() if has_expert_parallelism else Split(rank, tensor),
            )
            for rank in range(tensor)
        ]
    return shards


def assume_boxes(shape: ModelShape, parallel: GenerationParallelConfig) -> list[list[Box]]:
    """Assume boxes of an engine's ranks without vLLM: it cuts matrices as Megatron-Core does.

    With more tensor-parallel ranks than heads of keys and values, vLLM's ranks have copies of these.
    """
    entries, engine = build_weight_map(shape), []
    tensors = index_tensors(entries, shape)
    for shard in split_engine(parallel, shape):
        cuts: dict[tuple[HFTensor, int], list[BoxLayout]] = {}
        boxes = []
        for name, key in tensors.items():
            entry = entries[key.row]
            # A tensor of all experts has a box for each that the rank keeps.
            experts = range(*shard.experts) if entry.is_stacked else range(key.expert, key.expert + 1)
            for expert in experts if shard.keeps(entry, key.layer) else ():
                if entry.per_expert and not shard.experts[0] <= expert < shard.experts[1]:
                    continue
                form = key.tensor, expert if entry.is_stacked else 0
                if form not in cuts:
                    cuts[form] = _cut_tensor(name, entry, key.layer, expert, _find_split(shard, entry, shape), shape)
                boxes += [Box(name, name, cut) for cut in cuts[form]]
        engine.append(boxes)
    return engine


def _find_split(shard: RankShard, entry: WeightEntry, shape: ModelShape) -> Split:
    split = shard.find_split(entry)
    groups = shape.sizes.get(entry.split or "", split.count)
    if shape.output_gate and entry.split == "groups" and split.count > groups:
        # Ranks that share a group count as if each had all of it, which is more than they hold.
        return Split(split.index * groups // split.count, groups)
    return split


def _cut_tensor(
    name: str, entry: WeightEntry, layer: int, expert: int, split: Split, shape: ModelShape
) -> list[BoxLayout]:
    slices = entry.list_slices(shape, layer, split.index, split.count, expert)
    parts = [find_ranges(part) for part in slices if part.name == name]
    return [BoxLayout(part, part, tuple(range(len(part)))) for part in parts if count_elements(part)]
