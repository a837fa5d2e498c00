"""Runs on ranks of the policy and in engines' workers: many tensors in one flat buffer, with version and checksum
behind them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import xxhash
from torch import Tensor

ALIGN_BYTES = 16
"""Every tensor begins at a multiple of this, so that a slice of the buffer can be viewed in any type."""
TRAILER_BYTES = 16
"""Bytes behind the payload: version and checksum, int64 each."""

CHUNK_WORDS = 1 << 20
"""Words that a checksum multiplies at a time: 8 MiB, so that the products need little memory beside the bucket."""
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, as int64: spreads position over all bits (Knuth, TAOCP vol. 3, 6.4)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of one tensor in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor without the padding behind it."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor, in the slot's shape and dtype, sharing memory with the buffer: [bytes], uint8."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer of tensors that is sent in one transfer."""

    slots: tuple[Slot, ...]
    payload_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of payload and checksum together."""
        return self.payload_bytes + TRAILER_BYTES


def plan_buckets(tensors: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> list[Bucket]:
    """Assign tensors to buckets in their order, each filled up to `bucket_bytes`.

    A larger tensor gets a bucket of its own: the receiver needs it whole to select its shard.

    Args:
        tensors: (name, dtype without "torch.", shape).
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    used = 0
    for name, dtype, shape in tensors:
        slot = Slot(name, getattr(torch, dtype), tuple(shape), used)
        if slots and used + slot.nbytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), used))
            slots, slot = [], replace(slot, offset=0)
        slots.append(slot)
        # Rounded up: a view of the buffer in a wider type must begin at a multiple of that type's size.
        used = slot.offset + -(-slot.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    if slots:
        buckets.append(Bucket(tuple(slots), used))
    return buckets


def write_checksum(buffer: Tensor, version: int) -> None:
    """Write version and checksum behind the payload.

    Args:
        buffer: [Bucket.nbytes], uint8, payload filled in.
        version: number of the weights that the payload is part of.
    """
    words = buffer.view(torch.int64)
    words[-2] = version
    words[-1] = _digest(words[:-1])


def checksum_problem(buffer: Tensor, version: int) -> str | None:
    """The problem of a received bucket; None: it is intact.

    Args:
        buffer: [Bucket.nbytes], uint8, as it was received.
        version: number of the weights that the bucket should hold.
    """
    # Three numbers in one transfer from the device, which waits for it once instead of three times.
    words = buffer.view(torch.int64)
    found, expected, sent_version = torch.stack([_digest(words[:-1]), words[-1], words[-2]]).tolist()
    if found != expected:
        return f"checksum {found & (2**64 - 1):016x} differs from the sender's {expected & (2**64 - 1):016x}"
    if sent_version != version:
        return f"holds version {sent_version}, not {version}"
    return None


def _digest(words: Tensor) -> Tensor:
    """[], int64: on a CPU XXH3 (64 bits), which is many times as fast there as the checksum for GPUs."""
    if words.device.type != "cpu":
        return checksum(words)
    unsigned = xxhash.xxh3_64_intdigest(words.numpy().data)
    return torch.tensor(unsigned - (1 << 64) if unsigned >> 63 else unsigned)


def checksum(words: Tensor) -> Tensor:
    """Position-weighted sum modulo 2^64: chunk by chunk, h <- h * GOLDEN + sum_i words[i] * weight[i].

    Weights are odd, so a change of any single word always shows; different everywhere in a chunk, so exchanged words do
    too, but for rare differences in high bits alone.

    Args:
        words: [n], int64, on any device.

    Returns:
        [], int64, on the device of the words.
    """
    # In chunks, so that one table of weights serves every size. int64 wraps round: the sum is modulo 2^64, exact in any
    # order of summation, and so equal on every device.
    weights = _weights(words.device)
    total = words.new_zeros(())
    for chunk in words.split(CHUNK_WORDS):
        total = total * GOLDEN + (chunk * weights[: chunk.numel()]).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """[CHUNK_WORDS], int64: odd weights, different at every position of a chunk."""
    return torch.arange(1, CHUNK_WORDS + 1, device=device) * GOLDEN | 1
