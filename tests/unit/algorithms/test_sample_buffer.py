"""Sampling ahead of steps: the prompts of the data in their order, once each, also when a run is killed in between."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.algorithms.sample_buffer import OrderedBuffer
from megatron_grpo.config.loop_schema import AsyncGRPOConfig
from megatron_grpo.observability.timing import StepTimer
from tests.support.sample_buffers import Process, Prompts, course

DATA = Prompts(rows=11, per_batch=3, epochs=3)


def begin(age: int, checkpoint: dict[str, Any] | None = None, steps: int = 99) -> Process:
    config = AsyncGRPOConfig(enabled=True, max_trajectory_age_steps=age)
    return Process(OrderedBuffer, DATA, config, checkpoint=checkpoint, steps=steps)


@pytest.mark.parametrize("age", [0, 1, 4])
def test_the_same_batches_in_the_same_order_with_the_same_seeds(age: int) -> None:
    process, expected = begin(age), DATA.in_turn()
    assert len(expected) == DATA.batches
    assert process.rest() == expected
    assert [(request["generation_batch"], request["rows"]) for request in process.rollouts.asked] == list(
        enumerate(expected, start=1)
    )


@given(
    age=st.integers(0, 4),
    lives=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8),
)
def test_killed_at_any_moment_no_prompt_is_lost_or_repeated(age: int, lives: list[tuple[int, int]]) -> None:
    assert course(lambda checkpoint: begin(age, checkpoint), lives) == DATA.in_turn()


def test_what_is_begun_and_what_is_left_for_later() -> None:
    process = begin(age=2)
    process.take()
    assert len(process.rollouts.asked) == 3, "the step's own batch and those of two more"
    assert process.buffer.count_prompts() == {"buffer_depth": 2.0 * DATA.per_batch, "buffer_in_flight": 0.0}
    process.take()
    assert len(process.rollouts.asked) == 4, "one for each that is taken"


def test_nothing_is_sampled_that_no_step_is_left_for() -> None:
    process = begin(age=4, steps=3)
    for _ in range(3):
        assert process.take()
    assert len(process.rollouts.asked) == 3


@given(age=st.integers(0, 4), versions=st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_no_batch_is_too_old_when_steps_take_several(age: int, versions: list[int]) -> None:
    """Dynamic sampling takes several batches a step; as many are begun as the age allows, and none becomes older."""
    process, order, oldest = begin(age), [], 0
    begun_at: list[int] = []
    for version, batches in enumerate(versions):
        for _ in range(batches):
            groups = process.buffer.take(process.batches, version, StepTimer())
            begun_at += [version] * (len(process.rollouts.asked) - len(begun_at))
            if groups is None:
                break
            oldest = max(oldest, version - begun_at[len(order)])
            order.append([group.outcomes[0].prompt_idx for group in groups])
    assert order == DATA.in_turn()[: len(order)]
    assert oldest <= age
    if len(order) == sum(versions) == len(versions) <= DATA.batches - age:
        assert oldest == min(age, len(versions) - 1)
