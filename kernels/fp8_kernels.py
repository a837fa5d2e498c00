"""Blockwise FP8 in Triton (`fp8_blocks`): one pass over the values, where torch makes five and a float32 copy.

Numbers become bits of float8_e4m3fn by integer arithmetic. A conversion in Triton needs a GPU of compute capability 8.9
or more, and its interpreter loses the carry when a mantissa is rounded up to the next power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_grpo_kernels.fp8_format import BLOCK, LARGEST, SMALLEST_SCALE, count_blocks

# Compile-time constants of the kernel.
SETTINGS = {"SMALLEST": SMALLEST_SCALE, "LARGEST": LARGEST, "SIDE": BLOCK, "num_warps": 8}


def quantise_in_triton(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise on CUDA or in the interpreter (`fp8_blocks.quantise`)."""
    values = values.contiguous()
    bits = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty(*map(count_blocks, values.shape), dtype=torch.float32, device=values.device)
    _quantise[tuple(scales.shape)](values, bits, scales, *values.shape, **SETTINGS)  # CUDA allows 65535 blocks across
    return bits.view(torch.float8_e4m3fn), scales


@triton.jit
def _quantise(
    values: tl.tensor,
    bits: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    SMALLEST: tl.constexpr,  # noqa: N803  # Triton's convention for compile-time constants
    LARGEST: tl.constexpr,  # noqa: N803
    SIDE: tl.constexpr,  # noqa: N803
) -> None:
    """Quantise a block to bits, uint8, and a scale; the grid is the blocks."""
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    index = row[:, None] * columns + column[None, :]
    value = tl.load(values + index, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(value)
    largest = tl.broadcast_to(tl.max(tl.max(size, axis=1), axis=0), (SIDE,))
    # A maximum may ignore NaN, so numbers that are not finite are searched for separately.
    broken = tl.max(tl.where(size < float("inf"), 0, 1), axis=1)
    broken = tl.broadcast_to(tl.max(broken, axis=0), (SIDE,))
    scale = tl.div_rn(largest, tl.full((SIDE,), LARGEST, tl.float32))  # the plain quotient is off by a bit on a GPU
    scale = tl.where(scale < SMALLEST, 1.0, scale)
    scale = tl.where(broken > 0, float("nan"), scale)
    scaled = tl.div_rn(value, tl.broadcast_to(scale[:, None], (SIDE, SIDE)))
    tl.store(bits + index, _to_bits(scaled).to(tl.uint8), mask=inside)
    first = tl.arange(0, SIDE)
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1) + first, scale, mask=first == 0)


@triton.jit
def _to_bits(value: tl.tensor) -> tl.tensor:
    """Round float32 of at most 448 to the bits of float8_e4m3fn."""
    # Ties to even; NaN stays NaN. Sign, 4 bits of exponent with bias 7, 3 of mantissa; 1111 111 is NaN, no infinity.
    word = value.to(tl.uint32, bitcast=True)
    sign = (word >> 24) & 0x80
    size = word & 0x7FFFFFFF
    # 20 of the 23 bits of mantissa are dropped: adding 0x7FFFF and the last bit left rounds to nearest, ties to even.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (127 - 7) * 8
    # Below 2^-6 numbers are 2^-9 apart, as float32 is at 2^14: the addition rounds, and its last bits are the result.
    low = (tl.abs(value) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(tl.abs(value) < 0.015625, low, normal) | sign
    return tl.where(value == value, code, 0x7F)
