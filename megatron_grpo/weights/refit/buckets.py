"""Runs on ranks of the policy and in engines' workers: many tensors in one flat buffer, with version and checksum
behind them; and the two loops, of a sender and of a receiver, that a version goes through in such buffers."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.distributed import Work

from megatron_grpo.weights.refit.groups import leave_on_failure

ALIGN_BYTES = 16
"""Every tensor begins at a multiple of this, so that a slice of the buffer can be viewed in any type."""
TRAILER_BYTES = 16
"""Bytes behind the payload: version and checksum, int64 each."""
BUFFERS = 2
"""Of a rank: one is filled or read while the other one is being sent or received."""

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
    words[-1] = checksum(words[:-1])


def checksum_problem(buffer: Tensor, version: int) -> str | None:
    """The problem of a received bucket; None: it is intact.

    Args:
        buffer: [Bucket.nbytes], uint8, as it was received.
        version: number of the weights that the bucket should hold.
    """
    # Three numbers in one transfer from the device, which waits for it once instead of three times.
    words = buffer.view(torch.int64)
    found, expected, sent_version = torch.stack([checksum(words[:-1]), words[-1], words[-2]]).tolist()
    if found != expected:
        return f"checksum {found & (2**64 - 1):016x} differs from the sender's {expected & (2**64 - 1):016x}"
    if sent_version != version:
        return f"holds version {sent_version}, not {version}"
    return None


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


class Channel(ABC):
    """One end of links over which a version travels, in buffers whose order both ends know."""

    sizes: list[int]
    """Bytes of each buffer of a version, with the trailer."""
    depth = BUFFERS
    """Buffers that may be under way at a time."""

    @abstractmethod
    def buffer(self, number: int) -> Tensor:
        """[bytes with the trailer], uint8: the one of this number, on a receiver once it has arrived."""

    @abstractmethod
    def begin(self, number: int) -> list[Work]:
        """Start sending the buffer of this number, or receiving it."""

    def emptied(self, number: int) -> None:  # noqa: B027 - most have a buffer for themselves
        """Release the buffer that was received; views of it must not be used any more."""

    @abstractmethod
    def broken(self, number: int, problem: str) -> str:
        """What is said of a buffer that arrived damaged."""

    @abstractmethod
    def gone(self, number: int) -> str:
        """What is said when the other end does not receive or send a buffer."""

    @abstractmethod
    def close(self) -> None:
        """Leave the groups: others that wait for this process fail at once."""

    def send(self, fill: Callable[[int, Tensor], None], version: int) -> None:
        """Send one version: a buffer is filled while the previous one is being sent.

        Args:
            fill: writes the payload of the buffer of a number.
            version: number of the weights, written behind each payload.

        Raises:
            RuntimeError: a receiver stopped receiving, or the links failed before.
        """
        with leave_on_failure(self.close):
            self._send(fill, version)

    def _send(self, fill: Callable[[int, Tensor], None], version: int) -> None:
        under_way: dict[int, list[Work]] = {}
        for number in range(len(self.sizes)):
            if number >= BUFFERS:
                self._wait(number - BUFFERS, under_way)
            buffer = self.buffer(number)
            fill(number, buffer)
            write_checksum(buffer, version)
            under_way[number] = self.begin(number)
        for number in list(under_way):
            self._wait(number, under_way)

    def receive(self, load: Callable[[int, Tensor], None], version: int) -> None:
        """Receive one version: a buffer is loaded while the next one arrives.

        Args:
            load: takes the payload out of the buffer of a number; not called any more after the first broken checksum.
            version: number that the buffers should have.

        Raises:
            ValueError: a checksum was broken. Raised after the last buffer, so that nobody else is kept waiting.
            RuntimeError: a sender stopped sending, or the links failed before.
        """
        with leave_on_failure(self.close):
            broken = self._receive(load, version)
        if broken:
            raise ValueError("; ".join(broken))

    def _receive(self, load: Callable[[int, Tensor], None], version: int) -> list[str]:
        under_way = {number: self.begin(number) for number in range(min(self.depth, len(self.sizes)))}
        broken: list[str] = []
        for number in range(len(self.sizes)):
            self._wait(number, under_way)
            buffer = self.buffer(number)
            problem = checksum_problem(buffer, version)
            if problem is not None:
                broken.append(self.broken(number, problem))
            if not broken:
                load(number, buffer)
            self.emptied(number)
            if number + self.depth < len(self.sizes):  # into the buffer that is free now
                under_way[number + self.depth] = self.begin(number + self.depth)
        return broken

    def _wait(self, number: int, under_way: dict[int, list[Work]]) -> None:
        try:
            for work in under_way.pop(number):
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self.gone(number)}: {error}") from error
