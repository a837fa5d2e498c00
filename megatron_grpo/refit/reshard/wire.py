"""How pieces travel: in which type, and where each lies in its message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.models.families import weight_entries
from megatron_grpo.models.fp8_matrices import BLOCK, in_fp8_blocks
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry
from megatron_grpo.refit.buckets import ALIGN_BYTES
from megatron_grpo_kernels.fp8_blocks import WEIGHT_BLOCK, quantise

FP8 = "float8_e4m3fn"
"""Numbers of this type have a float32 scale for each block, which lie behind them."""
_SIZES = {"float32": 4, "bfloat16": 2, FP8: 1}
_SCALE_BYTES = 4


def wire_dtypes(shape: ModelShape, precision: str, fp8_blocks: bool) -> list[str]:
    """Type of each tensor on its way, by row of the model's table: the policy's precision, but for biases of routing.

    Args:
        shape: sizes of the model.
        precision: `policy.precision`.
        fp8_blocks: whether matrices of the layers travel in FP8.
    """
    return [_wire_dtype(entry, precision, fp8_blocks) for entry in weight_entries(shape)]


def _wire_dtype(entry: WeightEntry, precision: str, fp8_blocks: bool) -> str:
    if entry.megatron[0].endswith(".expert_bias"):  # which experts are chosen with; Megatron-Core has it in float32
        return "float32"
    return FP8 if fp8_blocks and in_fp8_blocks(entry) else precision


def piece_bytes(dtype: str, rows: int, columns: int) -> int:
    """Bytes of a piece of this type, with its scales."""
    numbers = rows * columns * _SIZES[dtype]
    return numbers if dtype != FP8 else _up(numbers, ALIGN_BYTES) + _SCALE_BYTES * blocks(rows) * blocks(columns)


def strip_rows(dtype: str, columns: int, limit: int) -> int:
    """How many rows of this length a piece of at most `limit` bytes has: one, or the rows of a block, at least."""
    rows = limit // (columns * _SIZES[dtype])
    return max(rows, 1) if dtype != FP8 else max(rows // BLOCK, 1) * BLOCK


def blocks(size: int) -> int:
    """Blocks along a side of a matrix."""
    return -(-size // BLOCK)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A piece as it lies in its message."""

    begin: int
    """Bytes of the message before it."""
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def scaled(self) -> bool:
        """Whether it is in FP8, with scales."""
        return self.dtype == torch.float8_e4m3fn

    def numbers(self, message: Tensor) -> Tensor:
        """[rows, columns], sharing memory with the message: [bytes], uint8."""
        end = self.begin + self.rows * self.columns * self.dtype.itemsize
        return message[self.begin : end].view(self.dtype).view(self.rows, self.columns)

    def scales(self, message: Tensor) -> Tensor:
        """[blocks of rows, blocks of columns], float32, sharing memory with the message, of a piece in FP8."""
        shape = blocks(self.rows), blocks(self.columns)
        begin = self.begin + _up(self.rows * self.columns, ALIGN_BYTES)
        return message[begin : begin + _SCALE_BYTES * shape[0] * shape[1]].view(torch.float32).view(shape)

    def pack(self, message: Tensor, values: Tensor) -> None:
        """Put numbers into the message: [bytes], uint8; in FP8 they are rounded, block by block.

        Args:
            message: where to put them.
            values: [rows, columns], any float type.
        """
        if self.scaled:
            values, scales = quantise(values, WEIGHT_BLOCK)
            self.scales(message).copy_(scales)
        self.numbers(message).copy_(values)


def parcels(pieces: Any, dtypes: Sequence[torch.dtype]) -> tuple[list[Parcel], int]:
    """Where the pieces of a message lie in it, one behind the other; and bytes of all.

    Args:
        pieces: [pieces], PIECE, in their order.
        dtypes: types by row of the model's table.
    """
    ends = np.cumsum(aligned(pieces["bytes"])).tolist()
    sizes = zip(np.diff(pieces["rows"])[:, 0].tolist(), np.diff(pieces["columns"])[:, 0].tolist(), strict=True)
    kinds = [dtypes[entry] for entry in pieces["entry"].tolist()]
    begins = [0, *ends[:-1]]
    found = [Parcel(begin, *size, kind) for begin, size, kind in zip(begins, sizes, kinds, strict=True)]
    return found, int(ends[-1])


def aligned(sizes: np.ndarray) -> np.ndarray:
    """Bytes that pieces take in a message: views in wider types begin at multiples of ALIGN_BYTES."""
    return -(-sizes // ALIGN_BYTES) * ALIGN_BYTES


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
