"""The replay buffer under any course of steps: order, age, back-pressure, and that it never runs dry needlessly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.controller.sample_buffer import ReplayBuffer

AGES = st.integers(0, 5)
TAKEN = st.lists(st.integers(1, 4), min_size=1, max_size=30)
"""Batches that each step takes: several with dynamic sampling."""
GREED = st.lists(st.integers(0, 8), min_size=1, max_size=30)
"""Batches that are added, at most, when a step is about to take one: prompts may come slowly."""


@given(age=AGES, taken=TAKEN, greed=GREED)
def test_nothing_is_lost_repeated_or_too_old(age: int, taken: list[int], greed: list[int]) -> None:
    buffer: ReplayBuffer[int] = ReplayBuffer(age)
    begun_at: list[int] = []
    used: list[int] = []
    for version, batches in enumerate(taken):
        for _ in range(batches):
            wanted = max(greed[(version + len(used)) % len(greed)], 1 - len(buffer))
            while wanted and buffer.has_room:
                buffer.add(len(begun_at), version)
                begun_at.append(version)
                wanted -= 1
            assert 0 < len(buffer) <= age + 1
            used.append(buffer.take(version))
            assert version - begun_at[used[-1]] <= age
        assert used + buffer.batches == list(range(len(begun_at)))


@given(age=AGES, taken=TAKEN)
def test_as_much_is_under_way_as_the_age_allows(age: int, taken: list[int]) -> None:
    """With one batch a step and a buffer that is filled whenever it may be, trajectories reach the age, not more."""
    buffer: ReplayBuffer[int] = ReplayBuffer(age)
    oldest = 0
    for version in range(len(taken)):
        while buffer.has_room:
            buffer.add(version, version)
        oldest = max(oldest, version - buffer.take(version))
    assert oldest == min(age, len(taken) - 1)


def test_what_would_become_too_old_is_not_begun() -> None:
    buffer: ReplayBuffer[str] = ReplayBuffer(1)
    buffer.add("first", 0)
    buffer.add("second", 0)
    assert not buffer.has_room
    with pytest.raises(AssertionError, match="too old"):
        buffer.add("third", 0)
    assert buffer.take(0) == "first"
    assert buffer.has_room, "for what the next step may take"
