"""Rounds matrices to FP8 in blocks of 128 x 128 with a scale each, as vLLM loads them: in torch, or in Triton on CUDA.

w ~ q * scale_inv, where q is float8_e4m3fn, and scale_inv is the block's largest absolute value / 448, float32. As in
DeepSeek-V3's checkpoints (DeepSeek-AI 2024, section 3.3.2) the scales are named `<weight>_scale_inv`.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_grpo_kernels.fp8_format import BLOCK, LARGEST, SMALLEST_SCALE, count_blocks


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round to FP8, ties to even: in Triton on CUDA, else in torch.

    A block with a number that is not finite becomes NaN as a whole, its scale too. A block whose largest absolute value
    is below 448 * 2^-126 becomes zeros with a scale of 1. `values`: [rows, columns], any float type. The results are
    [rows, columns], float8_e4m3fn, and [blocks of rows, blocks of columns], float32.
    """
    assert values.ndim == 2, f"blocks lie in matrices, and this is {list(values.shape)}"
    if values.is_cuda and importlib.util.find_spec("triton") is not None:
        from megatron_grpo_kernels.fp8_kernels import quantise_in_triton

        return quantise_in_triton(values)
    return quantise_in_torch(values)


def quantise_in_torch(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise in torch on any device; the Triton kernel equals it bit by bit."""
    rows, columns = values.shape
    down, across = count_blocks(rows), count_blocks(columns)
    padded = F.pad(values.float(), (0, across * BLOCK - columns, 0, down * BLOCK - rows))
    tiles = padded.view(down, BLOCK, across, BLOCK)
    largest = tiles.abs().amax(dim=(1, 3))  # NaN if any number is
    scale = largest / torch.full_like(largest, LARGEST)  # CUDA multiplies by the reciprocal of a plain number
    scale = torch.where(scale < SMALLEST_SCALE, 1.0, scale).masked_fill(~largest.isfinite(), torch.nan)
    quantised = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantised.view_as(padded)[:rows, :columns].contiguous(), scale
