"""Runs on the driver: plans which slice of which tensor goes from which rank of the policy to which rank of an engine.

Two tables say what a rank holds of each Hugging Face tensor: `WeightEntry.slices` for Megatron-Core's ranks, and
`find_destinations` for vLLM's. Both name rows and columns of the same full tensor, so what must travel between two
ranks is the intersection of their two boxes, whatever the two layouts are; no pair of layouts needs code of its own,
and no rank ever holds a full matrix. For each engine rank the boxes of one replica of the policy tile what it keeps,
without overlap. So each byte is sent exactly once to each rank that keeps it: of the policy's ranks that hold equal
data, one is chosen for a slice, and the choice is spread so that all of them send about the same number of bytes.

The plan depends on the configuration alone. The driver makes it once when links are connected; no rank negotiates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard, can_travel_in_fp8, find_destinations
from megatron_grpo.models.weight_map import WeightEntry, WeightSlice, is_per_layer, iter_entries
from megatron_grpo_kernels.fp8_blocks import quantise
from megatron_grpo_kernels.fp8_format import BLOCK, count_blocks

FP8 = "float8_e4m3fn"
"""Dtype of pieces whose elements are followed by a float32 scale for each block."""
_SCALE_BYTES = 4
_ALIGN_BYTES = 16
"""Every piece begins at a multiple of this, so that a slice of the message can be viewed in any type."""


def wire_dtypes(shape: ModelShape, precision: str, fp8_blocks: bool) -> list[str]:
    """The dtype in which each tensor is sent, by row of the weight map: FP8, the policy's precision, or for biases of
    routing float32.

    Args:
        shape: sizes of the model.
        precision: `policy.precision`.
        fp8_blocks: whether the layers' matrices travel in FP8.
    """
    entries = build_weight_map(shape)
    found = [FP8 if fp8_blocks and can_travel_in_fp8(entry) else precision for entry in entries]
    for number, entry in enumerate(entries):
        if entry.megatron[0].endswith(".expert_bias"):  # selects experts; Megatron-Core keeps it in float32
            found[number] = "float32"
    return found


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """The position and layout of a piece in its message."""

    begin: int
    """Bytes of the message before the piece."""
    rows: int
    columns: int
    dtype: torch.dtype

    def numbers(self, message: Tensor) -> Tensor:
        """The piece's elements, [rows, columns], which share memory with the message, [bytes], uint8."""
        end = self.begin + self.rows * self.columns * self.dtype.itemsize
        return message[self.begin : end].view(self.dtype).view(self.rows, self.columns)

    def scales(self, message: Tensor) -> Tensor | None:
        """Scales, [blocks of rows, blocks of columns], float32, in the message's memory; None: the piece is not FP8."""
        if self.dtype != torch.float8_e4m3fn:
            return None
        shape = count_blocks(self.rows), count_blocks(self.columns)
        begin = self.begin + aligned(self.rows * self.columns)
        return message[begin : begin + _SCALE_BYTES * shape[0] * shape[1]].view(torch.float32).view(shape)

    def pack(self, message: Tensor, values: Tensor) -> None:
        """Write values, [rows, columns] of any float type, to the message, [bytes], uint8; for FP8 block by block."""
        scales = self.scales(message)
        if scales is not None:
            values, rounded = quantise(values)
            scales.copy_(rounded)
        self.numbers(message).copy_(values)


def packed_pieces(pieces: Any, dtypes: Sequence[torch.dtype]) -> tuple[list[PackedPiece], int]:
    """The consecutive positions of a message's pieces, and the bytes of the message.

    Args:
        pieces: [pieces], PIECE, in their order.
        dtypes: dtypes by row of the weight map.
    """
    ends = np.cumsum(aligned(pieces["bytes"])).tolist()
    sizes = zip(np.diff(pieces["rows"])[:, 0].tolist(), np.diff(pieces["columns"])[:, 0].tolist(), strict=True)
    kinds = [dtypes[entry] for entry in pieces["entry"].tolist()]
    begins = [0, *ends[:-1]]
    found = [PackedPiece(begin, *size, kind) for begin, size, kind in zip(begins, sizes, kinds, strict=True)]
    return found, int(ends[-1])


def aligned(sizes: Any) -> Any:
    """Bytes of pieces, rounded up to a multiple of _ALIGN_BYTES."""
    return -(-sizes // _ALIGN_BYTES) * _ALIGN_BYTES


PIECE = np.dtype(
    [
        ("source", np.int32),  # rank of the policy
        ("target", np.int32),  # rank among those of all engines, engine by engine
        ("entry", np.int16),  # row of the weight map
        ("tensor", np.int8),  # number among the entry's tensors
        ("layer", np.int16),
        ("expert", np.int16),
        ("rows", np.int32, 2),  # [begin, end) in the whole Hugging Face tensor
        ("columns", np.int32, 2),  # [begin, end) in the whole tensor; (0, 1) for a vector
        ("bytes", np.int64),
        ("turn", np.int32),  # turn of the message, for its source as for its target
    ]
)
"""A box of a Hugging Face tensor that one rank sends to another."""

Pieces = NDArray[Any]
"""[pieces], PIECE."""


def tensor_name(entries: Sequence[WeightEntry], piece: Any) -> str:
    """Name of the Hugging Face tensor that a piece is cut from."""
    name = entries[piece["entry"]].hf[piece["tensor"]].name
    return name.format(layer=piece["layer"], expert=piece["expert"])


class Box(NamedTuple):
    """Rows [row, row_end) and columns [column, column_end) of a tensor."""

    row: int
    row_end: int
    column: int
    column_end: int

    @property
    def rows(self) -> int:
        """Number of rows; 0 or less: the box is empty."""
        return self.row_end - self.row

    @property
    def columns(self) -> int:
        """Number of columns; 0 or less: the box is empty."""
        return self.column_end - self.column


def box_of(part: WeightSlice) -> Box:
    """The rows and columns of a slice; a vector has one column."""
    rows, columns = part.shape[0], part.shape[1] if len(part.shape) > 1 else 1
    if part.axis == 0:
        return Box(part.start, part.stop, 0, columns)
    if part.axis == 1:
        return Box(0, rows, part.start, part.stop)
    return Box(0, rows, 0, columns)


def plan_pieces(
    shape: ModelShape,
    sources: Sequence[RankShard],
    engine: Sequence[RankShard],
    engines: int,
    dtypes: Sequence[str],
    limit: int,
    *,
    same_devices: bool = False,
) -> Pieces:
    """Every piece of a refit: each box that some engine rank keeps, exactly once for each such rank.

    Ranks of the policy that hold equal data divide the sending by bytes.

    Args:
        shape: sizes of the model.
        sources: shards of the policy's ranks, in their order.
        engine: shards of the ranks of one engine, in their order.
        engines: number of engines, which have equal layouts.
        dtypes: dtype in which tensors are sent, by row of the weight map.
        limit: most bytes of a piece, unless a single row (in FP8, the rows of a block) is longer.
        same_devices: whether ranks of the policy and of engines with the same number share a device; a box that both
            hold is then sent by that policy rank and no other.

    Returns:
        Pieces in the order of the weight map, layer by layer.
    """
    entries = build_weight_map(shape)
    holders = _Holders(sources)
    found: list[Pieces] = []
    sets: list[NDArray[np.int64]] = []
    numbers = {entry: number for number, entry in enumerate(entries)}
    for entry, layer, _ in iter_entries(entries, shape, list(range(shape.layers))):
        if entry.copy:
            continue
        number, parts = numbers[entry], sources[0].part(entry).count
        for rank, shard in enumerate(engine):
            if not shard.keeps(entry, layer):
                continue
            experts = np.arange(*shard.experts) if entry.per_expert else np.zeros(1, dtype=np.int64)
            for tensor, part, strip, nbytes in _routes(entry, shape, parts, shard, dtypes[number], limit):
                pieces = np.zeros(len(experts), dtype=PIECE)
                pieces["target"], pieces["entry"], pieces["tensor"] = rank, number, tensor
                pieces["layer"], pieces["expert"] = layer, experts
                pieces["rows"], pieces["columns"] = strip[:2], strip[2:]
                pieces["bytes"] = nbytes
                found.append(pieces)
                sets.append(holders.numbers(entry, layer, part, experts))
    one = np.concatenate(found)
    pieces = np.tile(one, engines)
    pieces["target"] += np.repeat(np.arange(engines, dtype=np.int32) * len(engine), len(one))
    holding = np.concatenate(sets)
    pieces["source"] = holders.share(holding, one["bytes"], engines)
    if same_devices:
        is_local = holders.include(np.tile(holding, engines), pieces["target"])
        pieces["source"][is_local] = pieces["target"][is_local]
    return pieces


def _routes(
    entry: WeightEntry, shape: ModelShape, parts: int, shard: RankShard, dtype: str, limit: int
) -> Iterator[tuple[int, int, Box, int]]:
    """Yield (tensor, policy part, box of at most `limit` bytes, its bytes) for all that one engine rank keeps of an
    entry's matrices; tensor and part are numbers, and every layer and expert has the same boxes."""
    wanted = find_destinations(entry, shape, shard, expert=shard.experts[0] if entry.per_expert else 0)
    held = [entry.slices(shape, 0, part, parts) for part in range(parts if entry.axis is not None else 1)]
    size = getattr(torch, dtype).itemsize
    for tensor, destination in enumerate(wanted):
        kept = box_of(destination.part)
        for part, slices in enumerate(held):
            one = box_of(slices[tensor])
            both = Box(
                max(one.row, kept.row),
                min(one.row_end, kept.row_end),
                max(one.column, kept.column),
                min(one.column_end, kept.column_end),
            )
            if both.rows > 0 and both.columns > 0:
                rows = limit // (both.columns * size)
                # At least one row; in FP8 at least the rows of one block.
                height = max(rows, 1) if dtype != FP8 else max(rows // BLOCK, 1) * BLOCK
                for row in range(both.row, both.row_end, height):
                    strip = both._replace(row=row, row_end=min(row + height, both.row_end))
                    nbytes = strip.rows * strip.columns * size
                    if dtype == FP8:
                        nbytes = aligned(nbytes) + _SCALE_BYTES * count_blocks(strip.rows) * count_blocks(strip.columns)
                    yield tensor, part, strip, nbytes


class _Holders:
    """The sets of policy ranks that hold equal parts of an entry's matrices; each set has a number."""

    def __init__(self, shards: Sequence[RankShard]) -> None:
        self._shards = shards
        self._sets: dict[tuple[int, ...], int] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._experts = max(shards[0].experts[1] - shards[0].experts[0], 1)

    def numbers(self, entry: WeightEntry, layer: int, part: int, experts: NDArray[np.int64]) -> NDArray[np.int64]:
        """[experts], int64: for each expert the number of the set that holds a part of an entry's matrices."""
        firsts, inverse = np.unique(experts // self._experts * self._experts, return_inverse=True)
        return np.array([self._number(entry, layer, part, int(first)) for first in firsts])[inverse]

    def _number(self, entry: WeightEntry, layer: int, part: int, first_expert: int) -> int:
        where = layer if is_per_layer(entry.megatron[0]) else entry.megatron
        key = (where, entry.per_expert, entry.axis is None, part, first_expert)
        if key not in self._numbers:
            ranks = tuple(
                rank
                for rank, shard in enumerate(self._shards)
                if shard.keeps(entry, layer)
                and (entry.axis is None or shard.part(entry).index == part)
                and (not entry.per_expert or shard.experts[0] == first_expert)
            )
            self._numbers[key] = self._sets.setdefault(ranks, len(self._sets))
        return self._numbers[key]

    def share(self, numbers: NDArray[np.int64], sizes: NDArray[np.int64], engines: int) -> NDArray[np.int32]:
        """[engines * pieces], engine by engine: the rank that sends each piece. Ranks of a set take shares of
        consecutive pieces, equal in bytes.

        Args:
            numbers: [pieces], number of the set that holds each piece of an engine.
            sizes: [pieces], bytes.
            engines: number of engines, each of which gets all pieces.
        """
        senders = np.empty((engines, len(numbers)), dtype=np.int32)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(self._sets) + 1))
        for ranks, begin, end in zip(self._sets, bounds, bounds[1:], strict=False):
            mine = order[begin:end]
            until = np.cumsum(sizes[mine])
            middles = until - sizes[mine] / 2 + np.arange(engines)[:, None] * until[-1]
            senders[:, mine] = np.array(ranks)[(middles * len(ranks) / (engines * until[-1])).astype(np.int64)]
        return senders.reshape(-1)

    def include(self, numbers: NDArray[np.int64], ranks: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[n]: whether `ranks[i]` is in the set `numbers[i]`."""
        found = np.zeros(len(numbers), dtype=np.bool_)
        for number, members in enumerate(self._sets):
            mine = numbers == number
            found[mine] = np.isin(ranks[mine], members)
        return found
