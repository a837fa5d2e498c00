"""Reads boxes of FP8 and MXFP4 weights as floating-point numbers.

quantized_weights.py has the part without torch, which checks before a start import.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_grpo.models.quantized_weights import SHARED, Quantization

_BIAS = 127  # of exponents
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Bounds = tuple[tuple[int, int], ...]
"""[begin, end) of a box in each dimension."""


def read_fp8(weight: Any, scales: Any, bounds: Bounds, quantization: Quantization) -> Tensor:
    """Read a box of an FP8 matrix: [rows, columns], float32.

    `weight` and `scales` are slices of safetensors, of which only the box is read.
    """
    region = tuple(slice(begin, end) for begin, end in bounds)
    values: Tensor = weight[region].float()
    if quantization.block is None:
        return values.mul_(scales[...].float())
    blocks = zip(bounds, quantization.block, strict=True)
    covering = tuple(slice(begin // width, -(-end // width)) for (begin, end), width in blocks)
    factors: Tensor = scales[covering].float()
    for axis, ((begin, end), width) in enumerate(zip(bounds, quantization.block, strict=True)):
        first = begin // width * width
        factors = factors.repeat_interleave(width, dim=axis).narrow(axis, begin - first, end - begin)
    return values.mul_(factors)


def read_mxfp4(blocks: Any, exponents: Any, bounds: Bounds) -> Tensor:
    """Read a box of a tensor of experts, [experts, columns, rows], bfloat16.

    Files have the bytes as [experts, rows, groups of 32 columns, 16], the lower half of a byte first.
    """
    experts, (begin, end), rows = bounds
    first = begin // SHARED
    region = (slice(*experts), slice(*rows), slice(first, -(-end // SHARED)))
    numbers = [*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)]
    pairs = torch.tensor([[numbers[byte % 16], numbers[byte // 16]] for byte in range(256)], dtype=torch.bfloat16)
    values = F.embedding(blocks[region].int(), pairs).flatten(-2)
    shift = exponents[region].int() - _BIAS
    values *= torch.ldexp(torch.ones(shift.shape), shift)[..., None].to(values.dtype)
    return values.flatten(-2).narrow(-1, begin - first * SHARED, end - begin).transpose(1, 2)
