"""Steps that take what is complete first: every prompt of the data once, none too old, also when a run is killed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithms.sample_buffer import Oversampling
from megatron_grpo.batch.trajectory import SampledGroup
from megatron_grpo.config.loop_schema import AsyncGRPOConfig
from tests.support import sample_buffers
from tests.support.sample_buffers import Prompts, course

DATA = Prompts(rows=14, per_batch=4, epochs=2)
ORDERS = st.lists(st.integers(0, 99), min_size=1, max_size=40)
"""Decides which prompt is complete next."""
LAST_FIRST = (-1,)


class Process(sample_buffers.Process):
    """One whose prompts are complete in an order of the test's."""

    def __init__(
        self,
        order: Sequence[int],
        *,
        factor: float = 1.5,
        age: int = 1,
        checkpoint: dict[str, Any] | None = None,
        steps: int = 99,
    ) -> None:
        config = AsyncGRPOConfig(enabled=True, max_trajectory_age_steps=age, oversampling_factor=factor)
        draws = iter([order[number % len(order)] for number in range(1000)])
        super().__init__(
            Oversampling,
            DATA,
            config,
            checkpoint=checkpoint,
            steps=steps,
            next_complete=lambda remaining: next(draws) % remaining,
        )

    def take_groups(self) -> list[SampledGroup] | None:
        groups = super().take_groups()
        if groups is not None:
            assert [outcome.group for group in groups for outcome in group.outcomes] == [0, 0, 1, 1, 2, 2, 3, 3]
        return groups


@settings(max_examples=50)
@given(
    order=ORDERS,
    factor=st.sampled_from([1.25, 1.5, 1.75, 2, 2.5]),
    lives=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
)
def test_killed_at_any_moment_no_prompt_is_lost_or_repeated(
    order: list[int], factor: float, lives: list[tuple[int, int]]
) -> None:
    trained = course(lambda checkpoint: Process(order, factor=factor, age=2, checkpoint=checkpoint), lives)
    assert sorted(chain.from_iterable(trained)) == sorted(chain.from_iterable(DATA.in_turn()))


def test_a_run_that_goes_on_in_turn_begins_with_what_was_left_over() -> None:
    process = Process(LAST_FIRST)
    trained = [*(process.take() or []), *(process.take() or [])]
    rest = DATA.in_turn(process.checkpoint()["position"])
    assert [len(batch) for batch in rest] == [DATA.per_batch] * (DATA.batches - 2)
    assert sorted([*trained, *chain.from_iterable(rest)]) == sorted(chain.from_iterable(DATA.in_turn()))
    left_over = [row for batch in DATA.in_turn()[:3] for row in batch if row not in trained]
    assert rest[0] == left_over


def test_prompts_are_begun_in_the_order_of_the_data_with_the_seeds_of_their_batches() -> None:
    process, expected = Process(LAST_FIRST), DATA.in_turn()
    assert process.take() == [*expected[0][2:], *expected[1][:2]], "those that were begun last are complete first"
    assert process.buffer.count_prompts() == {
        "buffer_depth": 0.0,
        "buffer_in_flight": 2.0,
        "oversampling_left_over": 2.0,
        "oversampling_resumed": 0.0,
    }
    assert process.take() == [*expected[0][:2], *expected[1][2:]], "the oldest may not become older"
    assert process.buffer.count_prompts()["oversampling_resumed"] == 2.0
    requests = [(request["generation_batch"], request["rows"]) for request in process.rollouts.asked]
    assert requests[:4] == [(1, expected[0]), (2, expected[1][:2]), (2, expected[1][2:]), (3, expected[2][:2])]


@pytest.mark.parametrize("steps", [1, 2])
def test_nothing_is_sampled_that_no_step_is_left_for(steps: int) -> None:
    process = Process(LAST_FIRST, steps=steps)
    for _ in range(steps):
        assert process.take()
    assert sum(len(request["rows"]) for request in process.rollouts.asked) == steps * DATA.per_batch
