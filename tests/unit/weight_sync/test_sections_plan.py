"""Plans of refits for tensors whose sections ranks cut one by one, and for tensors of all experts."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families import FAMILIES
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.models.weight_map import WeightEntry, index_tensors, map_rows
from megatron_grpo.weight_sync import transfer_plan
from megatron_grpo.weight_sync.boxes import Box, Cut, Range, list_full_boxes, to_slices
from megatron_grpo.weight_sync.pieces import find_ranges, read_ranges
from tests.support.coming_layouts import SHAPE

TABLES = {"qwen3_next": FAMILIES["qwen3_next"].tables, "gpt_oss": FAMILIES["gpt_oss"].tables}
ROWS = {name: tuple(row for table in tables for row in map_rows(table)) for name, tables in TABLES.items()}
LAYOUTS = {
    "one rank": ParallelConfig(),
    "tensor": ParallelConfig(tensor=2),
    "experts": ParallelConfig(tensor=2, data=2, expert=2, expert_tensor=2),
}


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tables", TABLES)
def test_pieces_tile_every_box_and_lie_in_a_slice_of_their_sender(
    tables: str, layout: str, halves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ROWS[tables]
    monkeypatch.setattr(transfer_plan, "build_weight_map", lambda _: rows)
    keys = index_tensors(rows, SHAPE)
    sizes = {name: key.tensor.measure(SHAPE.sizes) for name, key in keys.items()}
    engine = [halved(list_full_boxes(sizes), halves)]
    shards = split_policy(LAYOUTS[layout], SHAPE)
    pieces = transfer_plan.plan_messages(SHAPE, shards, engine, 1, ["float32"] * len(rows), 2**10)
    counts = {name: torch.zeros(size) for name, size in sizes.items()}
    tensors = list(keys.items())
    for piece in pieces:
        name, key = tensors[piece["tensor"]]
        entry: WeightEntry = rows[key.row]
        ranges, shard, box = read_ranges(piece), shards[piece["source"]], engine[0][piece["box"]]
        assert box.tensor == name
        counts[name][to_slices(ranges)] += 1
        split, expert = shard.find_split(entry), ranges[0].begin if entry.is_stacked else key.expert
        assert not entry.per_expert or shard.experts[0] <= expert < shard.experts[1]
        slices = entry.list_slices(SHAPE, key.layer, split.index, split.count, expert)
        for outer in (find_ranges(slices[piece["section"]]), box.cut.tensor):
            assert all(a.begin <= b.begin and b.end <= a.end for a, b in zip(outer, ranges, strict=True))
    assert all((count == 1).all() for count in counts.values())
    assert any(entry.is_stacked for entry in rows)
    assert tables == "gpt_oss" or {*pieces["section"].tolist()} == {0, 1, 2}


def halved(boxes: list[Box], halves: int) -> list[Box]:
    """Boxes cut along their last dimension, wherever sections begin."""
    parts = []
    for box in boxes:
        *outer, last = box.cut.tensor
        width = -(-last.end // halves)
        for begin in range(0, last.end, width):
            ranges = (*outer, Range(begin, min(begin + width, last.end)))
            parts.append(box._replace(cut=Cut(ranges, ranges, tuple(range(len(ranges))))))
    return parts
