"""Blockwise FP8 as vLLM loads it: the numbers that its implementations in torch and in Triton share."""

from __future__ import annotations

BLOCK = 128
"""Rows and columns that share a scale. The last blocks of a row or column may be smaller."""

LARGEST = 448.0
"""Largest number of float8_e4m3fn."""

SMALLEST_SCALE = 2.0**-126
"""Smallest normal number of float32; some devices flush smaller numbers to zero, which cannot be divided by."""


def count_blocks(size: int) -> int:
    """Number of blocks along a side of a matrix."""
    return -(-size // BLOCK)
