"""Version and checksum behind the payload of a message, computed on its device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

TRAILER_BYTES = 16
"""Bytes behind the payload: version and checksum, int64 each."""

# Words that a checksum multiplies at a time: 8 MiB, so that the products need little memory beside the message.
CHUNK_WORDS = 1 << 20
# 2^64 divided by the golden ratio, as int64: spreads position over all bits (Knuth, TAOCP vol. 3, 6.4).
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def write_checksum(buffer: Tensor, version: int) -> None:
    """Write version and checksum behind the payload of a message, [bytes with the trailer], uint8."""
    words = buffer.view(torch.int64)
    words[-2] = version
    words[-1] = compute_checksum(words[:-1])


def find_checksum_problem(buffer: Tensor, version: int) -> str | None:
    """Find what is wrong with a received message, [bytes with the trailer], uint8; None: it is intact."""
    # Three numbers in one transfer from the device, which waits for it once instead of three times.
    words = buffer.view(torch.int64)
    actual, expected, sent_version = torch.stack([compute_checksum(words[:-1]), words[-1], words[-2]]).tolist()
    if actual != expected:
        return f"checksum {actual & (2**64 - 1):016x} differs from the sender's {expected & (2**64 - 1):016x}"
    if sent_version != version:
        return f"holds version {sent_version}, not {version}"
    return None


def compute_checksum(words: Tensor) -> Tensor:
    """Sum words, [n], int64, with weights by position, modulo 2^64: [], int64, on their device.

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
