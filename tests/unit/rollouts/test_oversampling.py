"""Steps that take what is complete first: every prompt of the data once, none too old, also when a run is killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.config.schema import AsyncGRPOConfig
from megatron_grpo.data.epoch_order import Visits
from megatron_grpo.data.loader import PromptLoader, prompt_batches
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.rollouts.oversampling import Oversampling
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import SETTINGS
from tests.support.trajectories import make_trajectory

ROWS, PER_BATCH, EPOCHS = 14, 4, 2
BATCHES = ROWS // PER_BATCH * EPOCHS
ORDERS = st.lists(st.integers(0, 99), min_size=1, max_size=40)
"""Decides which prompt is complete next."""
LAST_FIRST = (-1,)


class Rows:
    """Prompts of which only the number counts; the last one is too long."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, idx: int) -> Any:
        return {"idx": idx, "loss_multiplier": float(idx != ROWS - 1)}


def answers(prompts: Sequence[Any], samples: int) -> list[list[Trajectory]]:
    return [[make_trajectory(prompt_idx=prompt["idx"], sample=i) for i in range(samples)] for prompt in prompts]


def visits() -> Visits:
    return Visits([ROWS], [1.0], shuffle=True, seed=3)


class Process:
    """A driver from its start until it is killed: it takes prompts, and saves its position as a checkpoint would."""

    def __init__(
        self,
        order: Sequence[int],
        *,
        factor: float = 1.5,
        age: int = 1,
        checkpoint: dict[str, Any] | None = None,
        steps: int = 99,
    ) -> None:
        self.loader = PromptLoader(Rows(), prompts_per_batch=PER_BATCH, order=visits())
        self.taken = 0
        if checkpoint is not None:
            self.loader.load_state_dict(checkpoint["position"])
            self.taken = checkpoint["taken"]
        self.rollouts = FakeRollouts(answers)
        draws = iter([order[place % len(order)] for place in range(1000)])
        self.rollouts.next_complete = lambda left: next(draws) % left
        rollouts: Any = self.rollouts
        self.ahead = Oversampling(
            rollouts,
            self.loader,
            AsyncGRPOConfig(enabled=True, max_trajectory_age_steps=age, oversampling_factor=factor),
            samples_per_prompt=2,
            settings=SETTINGS,
            run_seed=5,
            begun=self.taken,
            max_num_steps=steps,
        )
        self.batches = prompt_batches(self.loader, EPOCHS)

    def take(self) -> list[int] | None:
        groups = self.ahead.take(self.batches, self.taken, StepTimer())
        if groups is None:
            return None
        assert [one.group for group in groups for one in group.outcomes] == [0, 0, 1, 1, 2, 2, 3, 3]
        self.taken += 1
        return [group.outcomes[0].prompt_idx for group in groups]

    def all(self) -> list[int]:
        """Rows of all steps that are left."""
        taken = []
        while (rows := self.take()) is not None:
            taken += rows
        return taken

    def checkpoint(self) -> dict[str, Any]:
        saved: dict[str, Any] = json.loads(json.dumps({"position": self.ahead.position, "taken": self.taken}))
        return saved


def in_turn() -> list[list[int]]:
    """Rows by batch, as a loop takes them that samples when it needs to."""
    loader = PromptLoader(Rows(), prompts_per_batch=PER_BATCH, order=visits())
    return [[prompt["idx"] for prompt in batch] for batch in prompt_batches(loader, EPOCHS)]


@settings(deadline=None, max_examples=50)
@given(
    order=ORDERS,
    factor=st.sampled_from([1.25, 1.5, 1.75, 2, 2.5]),
    course=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
)
def test_killed_at_any_moment_no_prompt_is_lost_or_repeated(
    order: list[int], factor: float, course: list[tuple[int, int]]
) -> None:
    """In each life of the run: steps before its last checkpoint, and steps after it, which the kill undoes."""
    trained: list[int] = []
    checkpoint = None
    for saved, undone in course:
        process = Process(order, factor=factor, age=2, checkpoint=checkpoint)
        for _ in range(saved):
            trained += process.take() or []
        checkpoint = process.checkpoint()
        for _ in range(undone):
            process.take()
    trained += Process(order, factor=factor, age=2, checkpoint=checkpoint).all()
    assert sorted(trained) == sorted(row for batch in in_turn() for row in batch)


def test_a_run_that_goes_on_in_turn_begins_with_what_was_left_over() -> None:
    process = Process(LAST_FIRST)
    trained = [*(process.take() or []), *(process.take() or [])]
    loader = PromptLoader(Rows(), prompts_per_batch=PER_BATCH, order=visits())
    loader.load_state_dict(process.checkpoint()["position"])
    rest = [[prompt["idx"] for prompt in batch] for batch in prompt_batches(loader, EPOCHS)]
    assert [len(batch) for batch in rest] == [PER_BATCH] * (BATCHES - 2)
    assert sorted([*trained, *(row for batch in rest for row in batch)]) == sorted(
        row for one in in_turn() for row in one
    )
    left_over = [row for batch in in_turn()[:3] for row in batch if row not in trained]
    assert rest[0] == left_over


def test_prompts_are_begun_in_the_order_of_the_data_with_the_seeds_of_their_batches() -> None:
    process, expected = Process(LAST_FIRST), in_turn()
    assert process.take() == [*expected[0][2:], *expected[1][:2]], "those that were begun last are complete first"
    assert process.ahead.metrics() == {
        "buffer_depth": 0.0,
        "buffer_in_flight": 2.0,
        "oversampling_left_over": 2.0,
        "oversampling_resumed": 0.0,
    }
    assert process.take() == [*expected[0][:2], *expected[1][2:]], "the oldest may not become older"
    assert process.ahead.metrics()["oversampling_resumed"] == 2.0
    asked = [(one["step"], one["rows"]) for one in process.rollouts.asked]
    assert asked[:4] == [(1, expected[0]), (2, expected[1][:2]), (2, expected[1][2:]), (3, expected[2][:2])]


@pytest.mark.parametrize("steps", [1, 2])
def test_nothing_is_sampled_that_no_step_is_left_for(steps: int) -> None:
    process = Process(LAST_FIRST, steps=steps)
    for _ in range(steps):
        assert process.take()
    assert sum(len(one["rows"]) for one in process.rollouts.asked) == steps * PER_BATCH
