"""Runs on the driver: plans which slice of which tensor goes from which policy rank to which engine rank, and when.

The plan depends on the configuration, and on the boxes that workers report. The driver makes it once when links are
connected; no rank negotiates.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import Store

from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard
from megatron_grpo.models.weight_map import HFTensor, WeightEntry, can_travel_in_fp8, cut_sections, index_tensors
from megatron_grpo.weight_sync.boxes import Box, Range, Ranges, count_elements, find_overlap
from megatron_grpo.weight_sync.pieces import FP8, NO_RELAY, PIECE, SCALE_BYTES, Pieces, align, find_ranges, mark_changes
from megatron_grpo_kernels.fp8_format import BLOCK, count_blocks

# Parameters in float32 whatever the precision: the bias that experts are chosen with, and the decay of delta nets.
_FLOAT32 = (".expert_bias", ".A_log")


def choose_wire_dtypes(shape: ModelShape, precision: str, fp8_blocks: bool) -> list[str]:
    """Choose dtypes in messages by row of the weight map."""
    dtypes = []
    for entry in build_weight_map(shape):
        if entry.name.endswith(_FLOAT32):
            dtypes.append("float32")
        else:
            dtypes.append(FP8 if fp8_blocks and can_travel_in_fp8(entry) else precision)
    return dtypes


def plan_messages(
    shape: ModelShape,
    policy_shards: Sequence[RankShard],
    engine: Sequence[Sequence[Box]],
    engine_count: int,
    dtypes: Sequence[str],
    bucket_bytes: int,
    *,
    devices_per_node: int | None = None,
    by_layer: bool = False,
) -> Pieces:
    """Plan the pieces that make up each engine rank's shard, and their messages.

    Args:
        policy_shards: shards of the policy's ranks, in their order.
        engine: boxes of the ranks of one engine, in their order.
        engine_count: number of engines, which all have this layout.
        dtypes: dtype in which tensors are sent, by row of the weight map.
        bucket_bytes: most bytes of a message, unless a single row (in FP8, the rows of a block) is longer than half.
        devices_per_node: given, policy rank n and engine rank n share a device. A part that both hold is then sent by
            that policy rank and no other, and a part that no rank on the target's node holds goes through that rank.
        by_layer: whether a worker gets one layer after another, instead of its links advancing together. A layer whose
            weights vLLM converts also has its plain weights while it is incomplete: gigabytes in the largest models.

    Returns:
        Pieces by turn of their message (`schedule_messages`).

    Raises:
        ValueError: an engine has no place for a tensor.
    """
    holders = _HolderSets(policy_shards)
    planned = list(_plan_engine(shape, engine, dtypes, bucket_bytes // 2, holders))
    engine_pieces = np.concatenate([pieces for pieces, _ in planned])
    holder_sets = np.concatenate([numbers for _, numbers in planned])
    # Parameters are complete soon after they were begun, since boxes are in the order of the tensors.
    order = np.lexsort((engine_pieces["box"], engine_pieces["target"]))
    engine_pieces, holder_sets = engine_pieces[order], holder_sets[order]
    pieces = np.tile(engine_pieces, engine_count)
    pieces["target"] += np.repeat(np.arange(engine_count, dtype=np.int32) * len(engine), len(engine_pieces))
    pieces["source"] = holders.assign_senders(holder_sets, engine_pieces["bytes"], engine_count)
    pieces["relay"] = NO_RELAY
    if devices_per_node is not None:
        holders.choose_nearest(pieces, np.tile(holder_sets, engine_count), devices_per_node)
    if not by_layer:
        return schedule_messages(pieces, bucket_bytes)
    layers = np.array([key.layer for key in index_tensors(build_weight_map(shape), shape).values()])[pieces["tensor"]]
    # Each engine begins at another layer, so that all stages of the policy have something to send.
    starts = pieces["target"] // len(engine) * shape.layers // engine_count
    return schedule_messages(pieces, bucket_bytes, (layers + starts) % shape.layers)


def _plan_engine(
    shape: ModelShape, engine: Sequence[Sequence[Box]], dtypes: Sequence[str], piece_bytes: int, holders: _HolderSets
) -> Iterator[tuple[Pieces, NDArray[np.int64]]]:
    """Yield an engine's pieces, and each one's set of holders."""
    entries = build_weight_map(shape)
    keys = index_tensors(entries, shape)
    unread = keys.keys() - {box.tensor for boxes in engine for box in boxes}
    if unread:
        raise ValueError(f"vLLM's model has no place for {', '.join(sorted(unread)[:3])} ({len(unread)} tensors)")
    # Boxes that differ only in their layer or expert are planned together: (rank, row, tensor, part of the tensor) to
    # (number of the tensor, layer, expert, index of the box).
    groups: defaultdict[tuple[int, int, HFTensor, Ranges], list[tuple[int, int, int, int]]] = defaultdict(list)
    for rank, boxes in enumerate(engine):
        for index, box in enumerate(boxes):
            if box.tensor:
                key = keys[box.tensor]
                groups[rank, key.row, key.tensor, box.layout.tensor].append((key.number, key.layer, key.expert, index))
    for (rank, row, tensor, part), members in groups.items():
        entry, dtype = entries[row], dtypes[row]
        numbers, layers, experts, indices = np.array(members).T
        split_count = holders.shards[0].find_split(entry).count
        for section, split, common in _find_routes(entry, tensor, part, shape, split_count):
            if entry.is_stacked:
                experts = np.full_like(layers, common[0].begin)
            sets = holders.find_sets(entry, split, layers, experts)
            for ranges, nbytes in _cut_pieces(common, dtype, piece_bytes):
                pieces = np.zeros(len(members), dtype=PIECE)
                pieces["target"], pieces["entry"], pieces["section"] = rank, row, section
                pieces["tensor"], pieces["box"] = numbers, indices
                pieces["ranges"][:, : len(ranges)], pieces["bytes"] = ranges, nbytes
                yield pieces, sets


def _find_routes(
    entry: WeightEntry, tensor: HFTensor, part: Ranges, shape: ModelShape, count: int
) -> Iterator[tuple[int, int, Ranges]]:
    """Cut a part of a tensor by its sections and the policy's ranks.

    Yields (index of the section in `WeightEntry.list_slices`, tensor-parallel part of the policy, of `count`, that
    holds the indices, indices).
    """
    # `WeightEntry.list_slices` says what Megatron-Core's ranks hold of each Hugging Face tensor, and traced boxes say
    # what vLLM's keep of it. Both are indices of the same full tensor, so the data that travel between two ranks are
    # the intersection of the two, whatever the two layouts are. So no pair of layouts needs code of its own, and no
    # rank ever holds a full matrix. The slices of one replica of the policy tile the full tensor without overlap, so
    # their intersections tile the engine rank's box: it receives each byte exactly once.
    experts = range(*part[0]) if entry.is_stacked else range(1)
    for expert, split in product(experts, range(count if entry.axis is not None else 1)):
        slices = entry.list_slices(shape, 0, split, count, expert)
        for number, (section, rank_part) in enumerate(zip(cut_sections(entry), slices, strict=True)):
            common = find_overlap(part, find_ranges(rank_part)) if section.tensor == tensor else None
            if common is not None:
                yield number, split, common


def _cut_pieces(part: Ranges, dtype: str, piece_bytes: int) -> Iterator[tuple[Ranges, int]]:
    """Cut a part of a tensor into pieces of whole rows, with their bytes.

    A piece has at most `piece_bytes`, unless a row (in FP8, the rows of a block) is longer.
    """
    rows, row_bytes = part[0], count_elements(part[1:]) * getattr(torch, dtype).itemsize
    height = max(piece_bytes // row_bytes, 1) if dtype != FP8 else max(piece_bytes // row_bytes // BLOCK, 1) * BLOCK
    for begin in range(rows.begin, rows.end, height * rows.step):
        piece_rows = rows.find_overlap(Range(begin, begin + height * rows.step))
        assert piece_rows is not None, "a piece has rows"
        nbytes = piece_rows.size * row_bytes
        if dtype == FP8:
            nbytes = align(nbytes) + SCALE_BYTES * count_blocks(piece_rows.size) * count_blocks(part[1].size)
        yield (piece_rows, *part[1:]), nbytes


class _HolderSets:
    """Numbered sets of policy ranks that hold equal parts of matrices."""

    def __init__(self, shards: Sequence[RankShard]) -> None:
        self.shards = shards
        self._sets: dict[tuple[int, ...], int] = {}  # number of each set of ranks
        self._numbers: dict[tuple[object, ...], int] = {}
        self._experts = max(shards[0].experts[1] - shards[0].experts[0], 1)

    def find_sets(
        self, entry: WeightEntry, part: int, layers: NDArray[np.int64], experts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Find the set that holds a part of each layer's and expert's parameter: [n]."""
        keys = np.stack([layers, experts // self._experts * self._experts])
        unique_keys, inverse = np.unique(keys, axis=1, return_inverse=True)
        numbers = []
        for layer, first_expert in unique_keys.T.tolist():
            parameter = entry.name if entry.half is None else layer
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
        return np.array(numbers)[inverse.reshape(-1)]

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

    def choose_nearest(self, pieces: Pieces, numbers: NDArray[np.int64], devices_per_node: int) -> None:
        """Let pieces come from their target's device, else its node, else through it.

        `numbers`: [pieces], number of the set that holds each piece. Senders are replaced where one is nearer.
        """
        sources, targets, nodes = pieces["source"], pieces["target"], pieces["target"] // devices_per_node
        for number, ranks in enumerate(self._sets):
            in_set, members = numbers == number, np.array(ranks)
            is_own = in_set & np.isin(targets, members)
            sources[is_own] = targets[is_own]
            is_far = in_set & (sources // devices_per_node != nodes)
            for node in np.unique(nodes[is_far]):
                near, chosen = members[members // devices_per_node == node], np.flatnonzero(is_far & (nodes == node))
                if len(near):  # their bytes lie on a line, as in `assign_senders`
                    ends = np.cumsum(pieces["bytes"][chosen])
                    middles = ends - pieces["bytes"][chosen] / 2
                    sources[chosen] = near[(middles * len(near) / ends[-1]).astype(np.int64)]
        pieces["relay"] = np.where(sources // devices_per_node != nodes, targets, NO_RELAY)


def schedule_messages(pieces: Pieces, bucket_bytes: int, order: NDArray[np.int64] | None = None) -> Pieces:
    """Assign pieces to messages, a rank's pieces of one turn; return them by turn.

    `pieces` are ordered so that a parameter is complete soon after it was begun. `bucket_bytes` are the most bytes of a
    message, unless a single piece is larger than half of it. `order`: [pieces], a target gets pieces of a smaller
    number first, and no message has pieces of two; None: all are equal.
    """
    order = np.zeros(len(pieces), dtype=np.int64) if order is None else order
    sorted_pieces = np.lexsort((order, pieces["target"], pieces["source"]))
    ordered, order = pieces[sorted_pieces], order[sorted_pieces]
    link_begins = np.flatnonzero(mark_changes(ordered["source"]) | mark_changes(ordered["target"]))
    links = np.repeat(np.arange(len(link_begins)), np.diff(link_begins, append=len(ordered)))
    sizes = align(ordered["bytes"])
    offsets = np.cumsum(sizes) - sizes
    # Each link's bytes are cut every half bucket, and pieces that begin in the same cut form one message. The last
    # piece may extend into the next cut, but has at most half a bucket, so that the message fits a bucket.
    halves = (offsets - offsets[link_begins][links]) // max(bucket_bytes // 2, 1)
    begins = np.flatnonzero(mark_changes(links) | mark_changes(halves) | mark_changes(order))
    numbers = np.arange(len(begins)) - np.searchsorted(begins, link_begins)[links[begins]]
    turns = _assign_turns(ordered[begins], numbers, order[begins])
    ordered["turn"] = np.repeat(turns, np.diff(begins, append=len(ordered)))
    return ordered[np.argsort(ordered["turn"], kind="stable")]


def _assign_turns(first_pieces: Pieces, numbers: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Give messages the first turn free at both ends.

    `numbers`: [messages], their index in their link; `order`: [messages], which come first.
    """
    # Sends and receives wait for their peer, so an unlucky order could make ranks wait for each other in a circle: A
    # for B, B for C, C for A. Turns exclude that. A message has one turn, the same at both ends; a rank has at most one
    # message a turn, and goes through its messages by increasing turn. Consider the unfinished message with the
    # smallest turn: neither of its two ranks has an earlier message left, so both have reached it and it can proceed.
    # By induction all messages are sent.
    turns = np.empty(len(first_pieces), dtype=np.int32)
    # A message that goes through a relay has the same turn there, too.
    free_turns: defaultdict[tuple[str, int], int] = defaultdict(int)
    sources, targets, relays = first_pieces["source"], first_pieces["target"], first_pieces["relay"]
    # Links advance together. In a round, neighbouring ranks have different peers, as in a round robin.
    for message in np.lexsort((sources, targets - sources, numbers, order)).tolist():
        ranks = [("source", int(sources[message])), ("target", int(targets[message]))]
        if relays[message] != NO_RELAY:
            ranks.append(("source", int(relays[message])))
        turns[message] = max(free_turns[rank] for rank in ranks)
        free_turns |= dict.fromkeys(ranks, int(turns[message]) + 1)
    return turns


def write_plan(
    store: Store, scheduled: Pieces, sources: int, targets: int, dtypes: Sequence[str], shared_memory: bool
) -> None:
    """Write every rank's messages into the store of the rendezvous.

    `sources` and `targets` are the numbers of ranks of the policy and of all engines. `dtypes` are by row of the weight
    map. With `shared_memory`, ranks of one machine use shared memory where possible.
    """
    relayed, everything = np.flatnonzero(scheduled["relay"] != NO_RELAY), np.arange(len(scheduled))
    settings = {"sources": sources, "dtypes": dtypes, "shared_memory": shared_memory, "relays": len(relayed) > 0}
    store.set("plan", json.dumps(settings))
    senders = np.append(scheduled["source"], scheduled["relay"][relayed]), np.append(everything, relayed)
    members = {"source": (sources, *senders), "target": (targets, scheduled["target"], everything)}
    for side, (ranks, owners, numbers) in members.items():
        order = numbers[np.lexsort((numbers, owners))]
        ends = np.cumsum(np.bincount(owners, minlength=ranks))
        for rank, indices in enumerate(np.split(order, ends[:-1])):
            # Many pieces are equal but for a number or two, and all plans go through the driver's one store.
            packed: Any = zlib.compress(scheduled[indices].tobytes(), level=1)  # torch's stubs want a text
            store.set(f"{side}/{rank}", packed)
