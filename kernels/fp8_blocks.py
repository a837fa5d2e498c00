"""Rounds matrices to FP8 with a scale for each block, and back: in torch, or in Triton on CUDA."""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_grpo_kernels.fp8_format import LARGEST, SMALLEST_SCALE, scales_shape

WEIGHT_BLOCK, ACTIVATION_BLOCK = (128, 128), (1, 128)
"""Rows and columns that share a scale. The last blocks of a row or column may be smaller."""


def quantise(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Round to FP8, ties to even, on the device of the values: in Triton on CUDA where it is installed, else in torch.

    A block with a number that is not finite becomes NaN as a whole, its scale too. A block whose largest absolute value
    is below 448 * 2^-126 becomes zeros with a scale of 1.

    Args:
        values: [rows, columns], any float type.
        block: `WEIGHT_BLOCK` or `ACTIVATION_BLOCK`.

    Returns:
        [rows, columns], float8_e4m3fn; and [ceil(rows / block rows), ceil(columns / block columns)], float32.
    """
    assert values.ndim == 2, f"blocks lie in matrices, and this is {list(values.shape)}"
    if _in_triton(values):
        from megatron_grpo_kernels.fp8_kernels import quantise_in_triton

        return quantise_in_triton(values, block)
    return quantise_in_torch(values, block)


def dequantise(quantised: Tensor, scale_inv: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The inverse of `quantise`: multiplied in float32, then rounded to the dtype.

    Args:
        quantised: [rows, columns], float8_e4m3fn.
        scale_inv: [ceil(rows / block rows), ceil(columns / block columns)], float32.
        block: `WEIGHT_BLOCK` or `ACTIVATION_BLOCK`.
        dtype: float type of the result.

    Returns:
        [rows, columns].
    """
    assert scale_inv.shape == scales_shape(quantised.shape, block), f"{list(scale_inv.shape)} scales do not fit"
    if _in_triton(quantised):
        from megatron_grpo_kernels.fp8_kernels import dequantise_in_triton

        return dequantise_in_triton(quantised, scale_inv, block, dtype)
    return dequantise_in_torch(quantised, scale_inv, block, dtype)


def quantise_in_torch(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`quantise` in torch, on any device; the Triton kernel equals it bit by bit."""
    rows, columns = values.shape
    across, along = scales_shape(values.shape, block)
    padded = F.pad(values.float(), (0, along * block[1] - columns, 0, across * block[0] - rows))
    blocks = padded.view(across, block[0], along, block[1])
    largest = blocks.abs().amax(dim=(1, 3))  # NaN if any number is
    scale = largest / LARGEST
    scale = torch.where(scale < SMALLEST_SCALE, 1.0, scale).masked_fill(~largest.isfinite(), torch.nan)
    quantised = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantised.view_as(padded)[:rows, :columns].contiguous(), scale


def dequantise_in_torch(quantised: Tensor, scale_inv: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """`dequantise` in torch, on any device; the Triton kernel equals it bit by bit."""
    rows, columns = quantised.shape
    of_numbers = scale_inv.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (quantised.float() * of_numbers).to(dtype)


def _in_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None
