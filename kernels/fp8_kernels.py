"""Blockwise FP8 in Triton (`fp8_blocks`): one pass over the values, where torch makes five and a float32 copy.

Numbers become bits of float8_e4m3fn and back by integer arithmetic. A conversion in Triton needs a GPU of compute
capability 8.9 or more, and its interpreter loses the carry when a mantissa is rounded up to the next power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_grpo_kernels.fp8_format import LARGEST, SMALLEST_SCALE, scales_shape

_ROWS_AT_A_TIME = 16
"""Rows that a program handles when blocks are parts of single rows."""


def quantise_in_triton(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`quantise` of [rows, columns], any float type, on CUDA or in the interpreter.

    Returns:
        [rows, columns], float8_e4m3fn; and the scale of each block, [blocks down, blocks across], float32.
    """
    values = values.contiguous()
    bits = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty(scales_shape(values.shape, block), dtype=torch.float32, device=values.device)
    _quantise[_grid(values, block)](
        values, bits, scales, *values.shape, SMALLEST=SMALLEST_SCALE, LARGEST=LARGEST, **_settings(block)
    )
    return bits.view(torch.float8_e4m3fn), scales


def dequantise_in_triton(quantised: Tensor, scale_inv: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """`dequantise` of [rows, columns], float8_e4m3fn, on CUDA or in the interpreter, to any float type."""
    values = torch.empty(quantised.shape, dtype=dtype, device=quantised.device)
    bits = quantised.contiguous().view(torch.uint8)
    _dequantise[_grid(quantised, block)](bits, scale_inv.contiguous(), values, *quantised.shape, **_settings(block))
    return values


def _settings(block: tuple[int, int]) -> dict[str, int | bool]:
    """Compile-time constants of both kernels."""
    by_row = block[0] == 1
    return {"ROWS": _ROWS_AT_A_TIME if by_row else block[0], "COLUMNS": block[1], "BY_ROW": by_row, "num_warps": 8}


def _grid(matrix: Tensor, block: tuple[int, int]) -> tuple[int, int]:
    """Numbers of programs over rows and over columns; CUDA limits the second to 65535."""
    return triton.cdiv(matrix.shape[0], _settings(block)["ROWS"]), triton.cdiv(matrix.shape[1], block[1])


@triton.jit
def _quantise(
    values: tl.tensor,
    bits: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    SMALLEST: tl.constexpr,  # noqa: N803  # as Triton's users write what a kernel is compiled for
    LARGEST: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    BY_ROW: tl.constexpr,  # noqa: N803
) -> None:
    """[rows, columns] to bits, uint8, and scales, [blocks down, blocks across], float32; grid: tiles of ROWS x COLUMNS.

    A tile is one block or, with blocks of one row (BY_ROW), a block for each of its rows.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    value = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(value)
    # A maximum may ignore NaN, so numbers that are not finite are searched for separately.
    largest = tl.max(size, axis=1)
    broken = tl.max(tl.where(size < float("inf"), 0, 1), axis=1)
    if not BY_ROW:
        largest = tl.broadcast_to(tl.max(largest, axis=0), (ROWS,))
        broken = tl.broadcast_to(tl.max(broken, axis=0), (ROWS,))
    scale = tl.div_rn(largest, tl.full((ROWS,), LARGEST, tl.float32))  # the plain quotient is off by a bit on a GPU
    scale = tl.where(scale < SMALLEST, 1.0, scale)
    scale = tl.where(broken > 0, float("nan"), scale)
    scaled = tl.div_rn(value, tl.broadcast_to(scale[:, None], (ROWS, COLUMNS)))
    tl.store(bits + place, _to_bits(scaled).to(tl.uint8), mask=inside)
    across = tl.num_programs(1)
    if BY_ROW:
        tl.store(scales + row * across + tl.program_id(1), scale, mask=row < rows)
    else:
        first = tl.arange(0, ROWS)
        tl.store(scales + tl.program_id(0) * across + tl.program_id(1) + first, scale, mask=first == 0)


@triton.jit
def _dequantise(
    bits: tl.tensor,
    scales: tl.tensor,
    values: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    BY_ROW: tl.constexpr,  # noqa: N803
) -> None:
    """Bits, [rows, columns], uint8, times the scale of their block, to the dtype of `values`; grid of `_quantise`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    code = tl.load(bits + place, mask=inside, other=0).to(tl.uint32)
    across = tl.num_programs(1)
    down = row if BY_ROW else row // ROWS
    scale = tl.load(scales + down * across + tl.program_id(1), mask=row < rows, other=0.0)
    value = _from_bits(code) * scale[:, None]
    tl.store(values + place, value.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _to_bits(value: tl.tensor) -> tl.tensor:
    """Bits of float8_e4m3fn, uint32, nearest to a float32 of at most 448, ties to even; NaN to NaN.

    Sign, 4 bits of exponent with bias 7, 3 of mantissa; 1111 111 is NaN, and there is no infinity.
    """
    word = value.to(tl.uint32, bitcast=True)
    sign = (word >> 24) & 0x80
    size = word & 0x7FFFFFFF
    # 20 of the 23 bits of mantissa are dropped: adding 0x7FFFF and the last kept bit rounds to nearest, ties to even.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (127 - 7) * 8
    # Below 2^-6 numbers are 2^-9 apart, as float32 is at 2^14: the addition rounds, and its last bits are the result.
    low = (tl.abs(value) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(tl.abs(value) < 0.015625, low, normal) | sign
    return tl.where(value == value, code, 0x7F)


@triton.jit
def _from_bits(code: tl.tensor) -> tl.tensor:
    """The float32 that bits of float8_e4m3fn, uint32, stand for."""
    exponent = (code >> 3) & 0xF
    mantissa = code & 0x7
    normal = (((exponent + (127 - 7)) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    size = tl.where((code & 0x7F) == 0x7F, float("nan"), size)
    return tl.where((code & 0x80) != 0, -size, size)
