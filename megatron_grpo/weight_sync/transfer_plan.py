"""Runs on the driver: plans which slice of which tensor goes from which policy rank to which engine rank, and when.

The plan depends on the configuration alone. The driver makes it once when links are connected; no rank negotiates.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import Store

from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.fp8_cuts import can_travel_in_fp8
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard, find_destinations
from megatron_grpo.models.weight_map import WeightEntry, iter_entries
from megatron_grpo.weight_sync.pieces import FP8, PIECE, SCALE_BYTES, Box, Pieces, align, find_box, mark_changes
from megatron_grpo_kernels.fp8_format import BLOCK, count_blocks


def choose_wire_dtypes(shape: ModelShape, precision: str, fp8_blocks: bool) -> list[str]:
    """Choose dtypes in messages by row of the weight map."""
    dtypes = []
    for entry in build_weight_map(shape):
        if entry.name.endswith(".expert_bias"):  # selects experts; Megatron-Core keeps it in float32
            dtypes.append("float32")
        else:
            dtypes.append(FP8 if fp8_blocks and can_travel_in_fp8(entry) else precision)
    return dtypes


def plan_messages(
    shape: ModelShape,
    policy_shards: Sequence[RankShard],
    engine_shards: Sequence[RankShard],
    engine_count: int,
    dtypes: Sequence[str],
    bucket_bytes: int,
    *,
    same_devices: bool = False,
) -> Pieces:
    """Plan the pieces that make up each engine rank's shard, and their messages.

    Args:
        policy_shards: shards of the policy's ranks, in their order.
        engine_shards: shards of the ranks of one engine, in their order.
        engine_count: number of engines, which all have this layout.
        dtypes: dtype in which tensors are sent, by row of the weight map.
        bucket_bytes: most bytes of a message, unless a single row (in FP8, the rows of a block) is longer than half.
        same_devices: whether policy rank n and engine rank n share a device; a box that both hold is then sent by that
            policy rank and no other.

    Returns:
        Pieces by turn of their message (`schedule_messages`).
    """
    holders = _HolderSets(policy_shards)
    planned = list(_plan_engine(shape, engine_shards, dtypes, bucket_bytes // 2, holders))
    engine_pieces = np.concatenate([pieces for pieces, _ in planned])
    holder_sets = np.concatenate([numbers for _, numbers in planned])
    pieces = np.tile(engine_pieces, engine_count)
    pieces["target"] += np.repeat(np.arange(engine_count, dtype=np.int32) * len(engine_shards), len(engine_pieces))
    pieces["source"] = holders.assign_senders(holder_sets, engine_pieces["bytes"], engine_count)
    if same_devices:
        is_local = holders.contain(np.tile(holder_sets, engine_count), pieces["target"])
        pieces["source"][is_local] = pieces["target"][is_local]
    return schedule_messages(pieces, bucket_bytes)


def _plan_engine(
    shape: ModelShape,
    engine_shards: Sequence[RankShard],
    dtypes: Sequence[str],
    piece_bytes: int,
    holders: _HolderSets,
) -> Iterator[tuple[Pieces, NDArray[np.int64]]]:
    """Yield an engine's pieces, and each one's set of holders."""
    entries = build_weight_map(shape)
    indices = {entry: index for index, entry in enumerate(entries)}
    for entry, layer, _ in iter_entries(entries, shape, list(range(shape.layers))):
        if entry.copy:
            continue
        index, parts = indices[entry], holders.shards[0].find_split(entry).count
        for rank, shard in enumerate(engine_shards):
            if not shard.keeps(entry, layer):
                continue
            experts = np.arange(*shard.experts) if entry.per_expert else np.zeros(1, dtype=np.int64)
            for tensor, part, box, nbytes in _find_routes(entry, shape, parts, shard, dtypes[index], piece_bytes):
                pieces = np.zeros(len(experts), dtype=PIECE)
                pieces["target"], pieces["entry"], pieces["tensor"] = rank, index, tensor
                pieces["layer"], pieces["expert"] = layer, experts
                pieces["rows"], pieces["columns"], pieces["bytes"] = box[:2], box[2:], nbytes
                yield pieces, holders.find_sets(entry, layer, part, experts)


def _find_routes(
    entry: WeightEntry, shape: ModelShape, parts: int, shard: RankShard, dtype: str, piece_bytes: int
) -> Iterator[tuple[int, int, Box, int]]:
    """Find the boxes of a row, in every layer, that an engine rank receives.

    Yields (index of the tensor in the row, tensor-parallel part of the policy that holds the box, box, its bytes); a
    box has at most `piece_bytes`, unless a row is longer.
    """
    # Two tables say what a rank holds of each Hugging Face tensor: `WeightEntry.list_slices` for Megatron-Core's ranks,
    # and `find_destinations` for vLLM's. Both name rows and columns of the same full tensor, so the data that travel
    # between two ranks are the intersection of their two boxes, whatever the two layouts are. So no pair of layouts
    # needs code of its own, and no rank ever holds a full matrix. The boxes of one replica of the policy tile the full
    # tensor without overlap, so their intersections tile the engine rank's part: it receives each byte exactly once.
    sent_boxes = [
        [find_box(part_slice) for part_slice in entry.list_slices(shape, 0, part, parts)]
        for part in range(parts if entry.axis is not None else 1)
    ]
    destinations = find_destinations(entry, shape, shard, expert=shard.experts[0] if entry.per_expert else 0)
    element_bytes = getattr(torch, dtype).itemsize
    for tensor, destination in enumerate(destinations):
        kept_box = find_box(destination.part)
        for part, boxes in enumerate(sent_boxes):
            common = boxes[tensor].find_overlap(kept_box)
            if common.rows <= 0 or common.columns <= 0:
                continue
            rows = piece_bytes // (common.columns * element_bytes)
            # At least one row; in FP8 at least the rows of one block.
            height = max(rows, 1) if dtype != FP8 else max(rows // BLOCK, 1) * BLOCK
            for row in range(common.row, common.row_end, height):
                strip = common._replace(row=row, row_end=min(row + height, common.row_end))
                nbytes = strip.rows * strip.columns * element_bytes
                if dtype == FP8:
                    nbytes = align(nbytes) + SCALE_BYTES * count_blocks(strip.rows) * count_blocks(strip.columns)
                yield tensor, part, strip, nbytes


class _HolderSets:
    """Numbered sets of policy ranks that hold equal parts of matrices."""

    def __init__(self, shards: Sequence[RankShard]) -> None:
        self.shards = shards
        self._sets: dict[tuple[int, ...], int] = {}  # number of each set of ranks
        self._numbers: dict[tuple[object, ...], int] = {}
        self._experts = max(shards[0].experts[1] - shards[0].experts[0], 1)

    def find_sets(self, entry: WeightEntry, layer: int, part: int, experts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find the number of the set that holds each expert's part: [experts]."""
        parameter = entry.name if entry.half is None else layer
        first_experts, inverse = np.unique(experts // self._experts * self._experts, return_inverse=True)
        numbers = []
        for first_expert in first_experts.tolist():
            key = (parameter, entry.per_expert, entry.axis is None, part, first_expert)
            if key not in self._numbers:
                ranks = tuple(
                    rank
                    for rank, shard in enumerate(self.shards)
                    if shard.keeps(entry, layer)
                    and (entry.axis is None or shard.find_split(entry).index == part)
                    and (not entry.per_expert or shard.experts[0] == first_expert)
                )
                self._numbers[key] = self._sets.setdefault(ranks, len(self._sets))
            numbers.append(self._numbers[key])
        return np.array(numbers)[inverse]

    def assign_senders(
        self, numbers: NDArray[np.int64], sizes: NDArray[np.int64], engine_count: int
    ) -> NDArray[np.int32]:
        """Choose senders, [engine_count * pieces]; ranks of a set send similar bytes.

        `numbers`: [pieces], number of the set that holds each piece of an engine. `sizes`: [pieces], bytes.
        """
        # The pieces of a set, those of all engines one after the other, lie on a line of their bytes. The line is cut
        # into equal lengths, one a rank, and a piece goes to the rank in whose length its middle lies.
        senders = np.empty((engine_count, len(numbers)), dtype=np.int32)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(self._sets) + 1))
        for ranks, begin, end in zip(self._sets, bounds, bounds[1:], strict=False):
            pieces = order[begin:end]
            ends = np.cumsum(sizes[pieces])
            middles = ends - sizes[pieces] / 2 + np.arange(engine_count)[:, None] * ends[-1]
            senders[:, pieces] = np.array(ranks)[(middles * len(ranks) / (engine_count * ends[-1])).astype(np.int64)]
        return senders.reshape(-1)

    def contain(self, numbers: NDArray[np.int64], ranks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """True where the set `numbers[i]` contains `ranks[i]`: [n]."""
        is_member = np.zeros(len(numbers), dtype=np.bool_)
        for number, members in enumerate(self._sets):
            in_set = numbers == number
            is_member[in_set] = np.isin(ranks[in_set], members)
        return is_member


def schedule_messages(pieces: Pieces, bucket_bytes: int) -> Pieces:
    """Assign pieces to messages, a rank's pieces of one turn; return them by turn.

    `pieces` are ordered so that a parameter is complete soon after it was begun. `bucket_bytes` are the most bytes of a
    message, unless a single piece is larger than half of it.
    """
    ordered = pieces[np.lexsort((pieces["target"], pieces["source"]))]
    link_begins = np.flatnonzero(mark_changes(ordered["source"]) | mark_changes(ordered["target"]))
    links = np.repeat(np.arange(len(link_begins)), np.diff(link_begins, append=len(ordered)))
    sizes = align(ordered["bytes"])
    offsets = np.cumsum(sizes) - sizes
    # Each link's bytes are cut every half bucket, and pieces that begin in the same cut form one message. The last
    # piece may extend into the next cut, but has at most half a bucket, so that the message fits a bucket.
    halves = (offsets - offsets[link_begins][links]) // max(bucket_bytes // 2, 1)
    begins = np.flatnonzero(mark_changes(links) | mark_changes(halves))
    turns = _assign_turns(ordered[begins], np.arange(len(begins)) - np.searchsorted(begins, link_begins)[links[begins]])
    ordered["turn"] = np.repeat(turns, np.diff(begins, append=len(ordered)))
    return ordered[np.argsort(ordered["turn"], kind="stable")]


def _assign_turns(first_pieces: Pieces, numbers: np.ndarray) -> np.ndarray:
    """Give messages the first turn free at both ends."""
    # Sends and receives wait for their peer, so an unlucky order could make ranks wait for each other in a circle: A
    # for B, B for C, C for A. Turns exclude that. A message has one turn, the same at both ends; a rank has at most one
    # message a turn, and goes through its messages by increasing turn. Consider the unfinished message with the
    # smallest turn: neither of its two ranks has an earlier message left, so both have reached it and it can proceed.
    # By induction all messages are sent.
    turns = np.empty(len(first_pieces), dtype=np.int32)
    free_turns: defaultdict[tuple[str, int], int] = defaultdict(int)
    sources, targets = first_pieces["source"], first_pieces["target"]
    # Links advance together. In a round, neighbouring ranks have different peers, as in a round robin.
    for message in np.lexsort((sources, targets - sources, numbers)).tolist():
        source, target = ("source", int(sources[message])), ("target", int(targets[message]))
        turns[message] = max(free_turns[source], free_turns[target])
        free_turns[source] = free_turns[target] = int(turns[message]) + 1
    return turns


def write_plan(
    store: Store, scheduled: Pieces, sources: int, targets: int, dtypes: Sequence[str], shared_memory: bool
) -> None:
    """Write every rank's messages into the store of the rendezvous.

    `sources` and `targets` are the numbers of ranks of the policy and of all engines. `dtypes` are by row of the weight
    map. With `shared_memory`, ranks of one machine use shared memory where possible.
    """
    store.set("plan", json.dumps({"sources": sources, "dtypes": dtypes, "shared_memory": shared_memory}))
    for side, ranks in (("source", sources), ("target", targets)):
        order = np.argsort(scheduled[side], kind="stable")
        ends = np.cumsum(np.bincount(scheduled[side], minlength=ranks))
        for rank, indices in enumerate(np.split(order, ends[:-1])):
            # Many pieces are equal but for a number or two, and all plans go through the driver's one store.
            packed: Any = zlib.compress(scheduled[indices].tobytes(), level=1)  # torch's stubs want a text
            store.set(f"{side}/{rank}", packed)
