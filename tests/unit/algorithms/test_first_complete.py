"""Which prompts a step takes of those under way, against every choice that there is."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.algorithms.sample_buffer import FirstComplete
from megatron_grpo.rollouts.pool import CompletePrompt

PER_TAKE = st.integers(1, 3)
AGES = st.integers(1, 3)
LUCK = st.lists(st.integers(0, 99), min_size=1, max_size=60)
"""Decides which prompt is complete next."""
TAKES = st.lists(st.integers(1, 2), min_size=1, max_size=8)
"""Takes of each step: several with dynamic sampling."""


def can_be_taken_in_time(begun_at: list[int], version: int, per_take: int, age: int) -> bool:
    """Whether steps from this version on, one take each, can take everything: the oldest first, which is best."""
    return all(version + index // per_take <= begun + age for index, begun in enumerate(sorted(begun_at)))


@given(per_take=PER_TAKE, age=AGES, beyond=st.integers(0, 8), luck=LUCK, takes=TAKES)
def test_a_step_takes_the_oldest_complete_ones_as_soon_as_what_remains_can_be_taken_in_time(
    per_take: int, age: int, beyond: int, luck: list[int], takes: list[int]
) -> None:
    buffer: FirstComplete = FirstComplete(per_take, age)
    under_way = min(per_take + beyond, per_take * (age + 1))
    begun_at: list[int] = []
    complete: list[int] = []
    used: list[int] = []
    passed_over: set[int] = set()
    draws = 0
    for version in [step for step, number in enumerate(takes) for _ in range(number)]:
        while len(buffer) < under_way:
            begun_at.append(version)
            assert buffer.add(100 + len(begun_at) - 1, version) == len(begun_at) - 1
        waiting = [number for number in range(len(begun_at)) if number not in used]
        while (batch := buffer.take(version)) is None:
            choices = combinations(complete, per_take)
            for chosen in choices:
                rest = [begun_at[number] for number in waiting if number not in chosen]
                assert not can_be_taken_in_time(rest, version + 1, per_take, age), "this could have been taken"
            unfinished = [number for number in waiting if number not in complete]
            finished = unfinished[luck[draws % len(luck)] % len(unfinished)]
            draws += 1
            complete.append(finished)
            buffer.put(CompletePrompt(0, finished, worker=0))
        numbers = [prompt.number for prompt in batch]
        assert numbers == sorted(complete)[:per_take]
        assert all(version - begun_at[number] <= age for number in numbers)
        assert buffer.resumed == len(passed_over & {*numbers})
        used += numbers
        complete = [number for number in complete if number not in numbers]
        remaining = [number for number in waiting if number not in numbers]
        left_over = {number for number in remaining if number < numbers[-1]}
        assert buffer.passed_over == len(left_over)
        passed_over |= left_over
        assert buffer.rows == [100 + number for number in remaining]
        assert buffer.complete == len(complete)
        assert can_be_taken_in_time([begun_at[number] for number in remaining], version + 1, per_take, age)
    assert len(used) == len(set(used))


def test_a_long_response_is_waited_for_when_its_time_has_come() -> None:
    buffer: FirstComplete = FirstComplete(2, max_age_steps=1)
    for row in range(3):
        buffer.add(row, version=0)
    for number in (1, 2):
        buffer.put(CompletePrompt(0, number, worker=0))
    first = buffer.take(0)
    assert first is not None
    assert ([prompt.number for prompt in first], buffer.resumed, buffer.passed_over) == ([1, 2], 0, 1)
    for row in (3, 4):
        buffer.put(CompletePrompt(0, buffer.add(row, version=1), worker=0))
    assert buffer.take(1) is None, "row 0 would be too old for the next step"
    buffer.put(CompletePrompt(0, 0, worker=0))
    second = buffer.take(1)
    assert second is not None
    assert ([prompt.number for prompt in second], buffer.resumed, buffer.passed_over) == ([0, 3], 1, 0)
    assert buffer.rows == [4]


def test_what_would_become_too_old_is_not_begun() -> None:
    buffer: FirstComplete = FirstComplete(1, max_age_steps=1)
    buffer.add(0, version=0)
    buffer.add(1, version=0)
    with pytest.raises(AssertionError, match="too old"):
        buffer.add(2, version=0)
