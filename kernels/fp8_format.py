"""Blockwise FP8 as vLLM loads it: the numbers that its implementations in torch and in Triton share."""

from __future__ import annotations

BLOCK = 128  # rows and columns that share a scale. The last blocks of a row or column may be smaller
LARGEST = 448.0  # largest number of float8_e4m3fn
# Smallest normal number of float32; some devices flush smaller numbers to zero, which cannot be divided by.
SMALLEST_SCALE = 2.0**-126


def count_blocks(size: int) -> int:
    """Count the blocks along a side of a matrix."""
    return -(-size // BLOCK)
