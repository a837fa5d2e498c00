"""Messages of a refit: pieces, which are parts of Hugging Face tensors, and the checksum behind them.

The driver plans pieces, ranks of the policy pack them into messages, and workers of engines read them there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.weight_sync.boxes import Range, Ranges
from megatron_grpo_kernels.fp8_format import count_blocks

if TYPE_CHECKING:
    from megatron_grpo.models.weight_map import WeightSlice

# Dtype of pieces whose elements are followed by a float32 scale for each block.
FP8 = "float8_e4m3fn"
SCALE_BYTES = 4
# Every piece begins at a multiple of this, so that a slice of the message can be viewed in any type.
_ALIGN_BYTES = 16
TRAILER_BYTES = 16  # behind the payload of a message: version and checksum, int64 each

# Words that a checksum multiplies at a time: 8 MiB, so that the products need little memory beside the message.
CHUNK_WORDS = 1 << 20
# 2^64 divided by the golden ratio, as int64: spreads position over all bits (Knuth, TAOCP vol. 3, 6.4).
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)

# Most dimensions of a tensor.
DIMENSIONS = 5

# A part of a Hugging Face tensor that one rank sends to another.
PIECE = np.dtype(
    [
        ("source", np.int32),  # rank of the policy
        ("target", np.int32),  # rank among those of all engines, engine by engine
        ("relay", np.int32),  # rank of the policy that hands the message over, or NO_RELAY
        ("entry", np.int16),  # row of the weight map
        ("tensor", np.int32),  # number of the tensor (`TensorKey`)
        ("section", np.int8),  # index in `WeightEntry.list_slices`
        ("ranges", np.int32, (DIMENSIONS, 3)),  # `Range` in each dimension of the full tensor, then (0, 0, 0)
        ("box", np.int32),  # index of the target's box that holds the part
        ("bytes", np.int64),
        ("turn", np.int32),  # turn of the message, for its source as for its target
    ]
)
Pieces = NDArray[Any]  # [pieces], PIECE
NO_RELAY = -1


def find_ranges(part: WeightSlice) -> Ranges:
    """Find the indices of a slice."""
    return tuple(Range(*bounds) for bounds in part.bounds)


def read_ranges(piece: Any) -> Ranges:
    """Read the indices of a piece in the full tensor."""
    return tuple(Range(*indices) for indices in piece["ranges"].tolist() if indices[2])


def split_messages(scheduled: Pieces) -> list[Pieces]:
    """Split a rank's scheduled pieces into its messages, by turn."""
    return np.split(scheduled, np.flatnonzero(mark_changes(scheduled["turn"]))[1:]) if len(scheduled) else []


def mark_changes(values: NDArray[Any]) -> NDArray[np.bool_]:
    """True where a value differs from the one before, and for the first: [n]."""
    return np.append(True, values[1:] != values[:-1])


def align(sizes: Any) -> Any:
    """Round sizes of pieces in bytes, an int or an array, to the alignment."""
    return -(-sizes // _ALIGN_BYTES) * _ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """The position and layout of a piece in its message."""

    begin: int  # bytes of the message before the piece
    sizes: tuple[int, ...]
    dtype: torch.dtype

    def view_values(self, message: Tensor) -> Tensor:
        """View the piece's elements in a message, [bytes], uint8: [*sizes]."""
        end = self.begin + math.prod(self.sizes) * self.dtype.itemsize
        return message[self.begin : end].view(self.dtype).view(self.sizes)

    def view_scales(self, message: Tensor) -> Tensor | None:
        """View the scales of an FP8 matrix, float32: [blocks of rows, of columns]."""
        if self.dtype != torch.float8_e4m3fn:
            return None
        shape = [count_blocks(size) for size in self.sizes]
        begin = self.begin + align(math.prod(self.sizes))
        return message[begin : begin + SCALE_BYTES * math.prod(shape)].view(torch.float32).view(shape)


def lay_out_pieces(pieces: Pieces, dtypes: Sequence[torch.dtype]) -> tuple[list[PieceLayout], int]:
    """Lay pieces out one after the other in a message.

    `dtypes` are by row of the weight map. Returns the positions of the pieces, and the bytes of the message.
    """
    ends = np.cumsum(align(pieces["bytes"])).tolist()
    sizes = [tuple(indices.size for indices in read_ranges(piece)) for piece in pieces]
    piece_dtypes = [dtypes[entry] for entry in pieces["entry"].tolist()]
    layouts = zip([0, *ends[:-1]], sizes, piece_dtypes, strict=True)
    return [PieceLayout(*layout) for layout in layouts], int(ends[-1])


def write_checksum(buffer: Tensor, version: int) -> None:
    """Write version and checksum behind a message's payload: [bytes with trailer], uint8."""
    words = buffer.view(torch.int64)
    words[-2] = version
    words[-1] = compute_checksum(words[:-1])


def find_checksum_problem(buffer: Tensor, version: int) -> str | None:
    """Find what is wrong with a received message; None: it is intact."""
    # Three numbers in one transfer from the device, which waits for it once instead of three times.
    words = buffer.view(torch.int64)
    actual, expected, sent_version = torch.stack([compute_checksum(words[:-1]), words[-1], words[-2]]).tolist()
    if actual != expected:
        return f"checksum {actual & (2**64 - 1):016x} differs from the sender's {expected & (2**64 - 1):016x}"
    if sent_version != version:
        return f"holds version {sent_version}, not {version}"
    return None


def compute_checksum(words: Tensor) -> Tensor:
    """Sum words, [n], int64, with weights by position, modulo 2^64.

    Chunk by chunk, h <- h * GOLDEN + sum_i words[i] * weight[i].

    Weights are odd, so a change of any single word changes the sum. Weights differ within a chunk, so exchanged words
    change it too, unless the words differ in their highest bits alone.
    """
    # In chunks, so that one table of weights serves every size. int64 wraps round: the sum is modulo 2^64, exact in any
    # order of summation, and so equal on every device.
    weights = _make_weights(words.device)
    total = words.new_zeros(())
    for chunk in words.split(CHUNK_WORDS):
        total = total * GOLDEN + (chunk * weights[: chunk.numel()]).sum()
    return total


@functools.cache
def _make_weights(device: torch.device) -> Tensor:
    """[CHUNK_WORDS], int64: odd weights, different at every position of a chunk."""
    return torch.arange(1, CHUNK_WORDS + 1, device=device) * GOLDEN | 1
