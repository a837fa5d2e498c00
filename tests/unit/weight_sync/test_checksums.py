"""Checksums: no damage of a message goes unnoticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_grpo.weight_sync import pieces
from megatron_grpo.weight_sync.pieces import TRAILER_BYTES, compute_checksum, find_checksum_problem, write_checksum


def test_every_flipped_bit_is_noticed() -> None:
    buffer = _message(payload_bytes=32)
    assert find_checksum_problem(buffer, version=7) is None
    for position in range(buffer.numel()):
        for bit in range(8):
            damaged = buffer.clone()
            damaged[position] ^= 1 << bit
            assert find_checksum_problem(damaged, version=7) is not None, (position, bit)


def test_exchanged_words_are_noticed() -> None:
    words = torch.randint(-(2**62), 2**62, (64,))
    found = {int(compute_checksum(words))}
    for i in range(64):
        for j in range(i):
            exchanged = words.clone()
            exchanged[[i, j]] = words[[j, i]]
            found.add(int(compute_checksum(exchanged)))
    assert len(found) == 1 + 64 * 63 // 2


def test_a_message_of_another_version_is_refused() -> None:
    assert find_checksum_problem(_message(payload_bytes=16), version=8) == "holds version 7, not 8"


def test_checksum_is_the_documented_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's integers, over several chunks."""
    monkeypatch.setattr(pieces, "CHUNK_WORDS", 8)
    pieces._make_weights.cache_clear()
    words = torch.randint(-(2**63), 2**63 - 1, (21,))
    expected, values = 0, words.tolist()
    for begin in range(0, 21, 8):
        part = sum(word * (((i + 1) * pieces.GOLDEN) | 1) for i, word in enumerate(values[begin : begin + 8]))
        expected = (expected * pieces.GOLDEN + part) % 2**64
    actual = int(compute_checksum(words)) % 2**64
    pieces._make_weights.cache_clear()
    assert actual == expected


def _message(payload_bytes: int) -> Tensor:
    buffer = torch.randint(256, (payload_bytes + TRAILER_BYTES,), dtype=torch.uint8)
    write_checksum(buffer, version=7)
    return buffer
