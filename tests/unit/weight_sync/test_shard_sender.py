"""Messages of a policy rank, packed from parameters that Megatron-Core lays out, against the full tensors."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.hf_weights import BoundEntry, merge_slices
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard, split_policy
from megatron_grpo.models.weight_map import index_tensors, iter_entries, pad_vocab
from megatron_grpo.weight_sync import shard_sender
from megatron_grpo.weight_sync.boxes import to_slices
from megatron_grpo.weight_sync.pieces import lay_out_pieces, read_ranges, split_messages
from megatron_grpo.weight_sync.shard_sender import ShardSender
from megatron_grpo.weight_sync.transfer_plan import plan_messages
from tests.support.engine_table import table_boxes
from tests.support.refit_models import SHAPES, full_tensor


def bind_parameters(shape: ModelShape, shard: RankShard, change: float) -> list[BoundEntry]:
    """The rank's parameters, each inside of a larger buffer as Megatron-Core has them, with changed values."""
    bound = []
    for entry, layer, _ in iter_entries(build_weight_map(shape), shape, shard.layers):
        if not shard.keeps(entry, layer):
            continue
        split = shard.find_split(entry)
        for expert in range(*shard.experts) if entry.per_expert else [0]:
            slices = entry.list_slices(shape, layer, split.index, split.count, expert)
            parts = [full_tensor(part.name, part.shape)[part.region] + change for part in slices]
            rows = pad_vocab(shape, split.count) // split.count
            merged = merge_slices(entry, parts, shape, rows)
            buffer = torch.cat([torch.zeros(expert + 3), merged.flatten()])
            parameter = buffer[expert + 3 :].view(merged.shape)
            bound.append(BoundEntry(entry, layer, parameter, expert - shard.experts[0] if entry.per_expert else 0))
    return bound


@pytest.mark.parametrize("family", sorted(SHAPES))
@pytest.mark.parametrize("number", [0, 3])
def test_messages_hold_the_parts_of_full_tensors(family: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = parse_model_shape(SHAPES[family])
    layout = ParallelConfig(tensor=2, data=2, expert=2 if shape.experts is not None else 1)
    generation = GenerationParallelConfig(tensor=2)
    shards, names = split_policy(layout, shape), list(index_tensors(build_weight_map(shape), shape))
    dtypes = ["float32"] * len(build_weight_map(shape))
    pieces = plan_messages(shape, shards, table_boxes(generation, shape), 1, dtypes, 1 << 14)
    messages = split_messages(pieces[pieces["source"] == number])
    layouts = [lay_out_pieces(message, [torch.float32] * len(dtypes)) for message in messages]
    sent: list[Tensor] = []

    def send(fill: Callable[[int, Tensor], None], version: int) -> None:
        for message, (_, size) in enumerate(layouts):
            sent.append(torch.zeros(size, dtype=torch.uint8))
            fill(message, sent[-1])

    links: Any = SimpleNamespace(
        messages=messages,
        packed_pieces=[packed for packed, _ in layouts],
        sizes=[size for _, size in layouts],
        is_relayed=[False] * len(messages),
        send=send,
    )
    rank: Any = SimpleNamespace(shape=shape, gather_chunks=list)
    sender = ShardSender(rank, shards[number], links)
    for change in (0.0, 1.0):
        sent.clear()
        bound = bind_parameters(shape, shards[number], change)
        monkeypatch.setattr(shard_sender, "bind_entries", lambda chunks, of, bound=bound: bound)
        sender.send(0)
        for message, (packed, _), buffer in zip(messages, layouts, sent, strict=True):
            for piece, part in zip(message, packed, strict=True):
                name = names[piece["tensor"]]
                full = full_tensor(name, measure(name, shape)) + change
                torch.testing.assert_close(
                    part.view_values(buffer), full[to_slices(read_ranges(piece))], rtol=0, atol=0
                )


def measure(name: str, shape: ModelShape) -> tuple[int, ...]:
    return index_tensors(build_weight_map(shape), shape)[name].tensor.measure(shape.sizes)
