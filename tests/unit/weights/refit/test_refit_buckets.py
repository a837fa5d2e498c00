"""Buckets: what is packed comes out again, and no damage goes unnoticed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.weights.refit import buckets
from megatron_grpo.weights.refit.buckets import (
    TRAILER_BYTES,
    Bucket,
    checksum,
    checksum_problem,
    plan_buckets,
    write_checksum,
)

Specs = list[tuple[str, str, tuple[int, ...]]]

SPECS = st.lists(
    st.tuples(st.sampled_from(["float32", "bfloat16", "uint8"]), st.lists(st.integers(1, 9), max_size=3).map(tuple)),
    min_size=1,
    max_size=12,
).map(lambda specs: [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(specs)])


@settings(max_examples=60, deadline=None)
@given(specs=SPECS, bucket_bytes=st.integers(1, 600))
def test_tensors_survive_packing(specs: Specs, bucket_bytes: int) -> None:
    tensors = {name: _random(dtype, shape) for name, dtype, shape in specs}
    unpacked = {}
    for bucket in plan_buckets(specs, bucket_bytes):
        buffer = _packed(bucket, tensors)
        assert checksum_problem(buffer, version=7) is None
        unpacked |= {slot.name: slot.view(buffer) for slot in bucket.slots}
    assert list(unpacked) == [name for name, _, _ in specs]
    for name, tensor in tensors.items():
        assert torch.equal(unpacked[name], tensor)


@settings(max_examples=60, deadline=None)
@given(specs=SPECS, bucket_bytes=st.integers(1, 600))
def test_buckets_are_as_full_as_they_may_be(specs: Specs, bucket_bytes: int) -> None:
    plan = plan_buckets(specs, bucket_bytes)
    for bucket, following in zip(plan, [*plan[1:], None], strict=True):
        end = max(slot.offset + slot.nbytes for slot in bucket.slots)
        assert end <= bucket_bytes or len(bucket.slots) == 1
        if following is not None:
            assert bucket.payload_bytes + following.slots[0].nbytes > bucket_bytes


def test_every_flipped_bit_is_noticed() -> None:
    (bucket,) = plan_buckets([("a", "float32", (5,)), ("b", "bfloat16", (3,))], 1 << 20)
    buffer = _packed(bucket, {"a": torch.randn(5), "b": torch.randn(3).bfloat16()})
    for position in range(buffer.numel()):
        for bit in range(8):
            damaged = buffer.clone()
            damaged[position] ^= 1 << bit
            assert checksum_problem(damaged, version=7) is not None, (position, bit)


def test_exchanged_words_are_noticed() -> None:
    words = torch.randint(-(2**62), 2**62, (64,))
    found = {int(checksum(words))}
    for i in range(64):
        for j in range(i):
            exchanged = words.clone()
            exchanged[[i, j]] = words[[j, i]]
            found.add(int(checksum(exchanged)))
    assert len(found) == 1 + 64 * 63 // 2


def test_a_bucket_of_another_version_is_refused() -> None:
    (bucket,) = plan_buckets([("a", "float32", (4,))], 64)
    assert checksum_problem(_packed(bucket, {"a": torch.ones(4)}), version=8) == "holds version 7, not 8"


def test_checksum_is_the_documented_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's integers, over several chunks."""
    monkeypatch.setattr(buckets, "CHUNK_WORDS", 8)
    buckets._weights.cache_clear()
    words = torch.randint(-(2**63), 2**63 - 1, (21,))
    expected, values = 0, words.tolist()
    for begin in range(0, 21, 8):
        part = sum(word * (((i + 1) * buckets.GOLDEN) | 1) for i, word in enumerate(values[begin : begin + 8]))
        expected = (expected * buckets.GOLDEN + part) % 2**64
    actual = int(checksum(words)) % 2**64
    buckets._weights.cache_clear()
    assert actual == expected


def _random(dtype: str, shape: tuple[int, ...]) -> Tensor:
    return (torch.randn(shape) * 50).to(getattr(torch, dtype))


def _packed(bucket: Bucket, tensors: dict[str, Tensor]) -> Tensor:
    buffer = torch.zeros(bucket.payload_bytes + TRAILER_BYTES, dtype=torch.uint8)
    for slot in bucket.slots:
        slot.view(buffer).copy_(tensors[slot.name])
    write_checksum(buffer, version=7)
    return buffer
