"""FP8 with a scale for each block, as vLLM loads it: weights in blocks of 128x128, activations of 1x128.

w ~ q * scale_inv, where q is float8_e4m3fn, and scale_inv is the block's largest absolute value / 448, float32. As in
DeepSeek-V3's checkpoints (DeepSeek-AI 2024, section 3.3.2) the scales are named `<weight>_scale_inv`.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
"""Largest number of float8_e4m3fn."""

SMALLEST_SCALE = 2.0**-126
"""Smallest normal number of float32; some devices flush smaller numbers to zero, which cannot be divided by."""


def scales_shape(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    """Number of blocks of a matrix of [rows, columns], in each direction."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])
