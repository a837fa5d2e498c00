"""Sampling ahead of steps: the prompts of the data in their order, once each, also when a run is killed in between."""

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
from megatron_grpo.rollouts.ahead import SamplingAhead
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import SETTINGS
from tests.support.trajectories import make_trajectory

ROWS, PER_BATCH, EPOCHS = 11, 3, 3
BATCHES = ROWS // PER_BATCH * EPOCHS


class Rows:
    """Prompts of which only the number counts; the last one is too long."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, idx: int) -> Any:
        return {"idx": idx, "loss_multiplier": float(idx != ROWS - 1)}


def answers(prompts: Sequence[Any], samples: int) -> list[list[Trajectory]]:
    return [[make_trajectory(prompt_idx=prompt["idx"], sample=i) for i in range(samples)] for prompt in prompts]


def order_of(*, shuffle: bool) -> Visits:
    return Visits([ROWS], [1.0], shuffle=shuffle, seed=3)


class Process:
    """A driver from its start until it is killed: it takes batches, and saves its position as a checkpoint would."""

    def __init__(
        self, age: int, checkpoint: dict[str, Any] | None = None, steps: int = 99, shuffle: bool = True
    ) -> None:
        self.loader = PromptLoader(Rows(), prompts_per_batch=PER_BATCH, order=order_of(shuffle=shuffle))
        self.taken = 0
        if checkpoint is not None:
            self.loader.load_state_dict(checkpoint["position"])
            self.taken = checkpoint["taken"]
        self.rollouts = FakeRollouts(answers)
        rollouts: Any = self.rollouts
        self.ahead = SamplingAhead(
            rollouts,
            self.loader,
            AsyncGRPOConfig(enabled=True, max_trajectory_age_steps=age),
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
        self.taken += 1
        return [group.outcomes[0].prompt_idx for group in groups]

    def checkpoint(self) -> dict[str, Any]:
        saved: dict[str, Any] = json.loads(json.dumps({"position": self.ahead.position, "taken": self.taken}))
        return saved


def in_turn() -> list[list[int]]:
    """Rows by batch, as a loop takes them that samples when it needs to."""
    loader = PromptLoader(Rows(), prompts_per_batch=PER_BATCH, order=order_of(shuffle=True))
    return [[prompt["idx"] for prompt in batch] for batch in prompt_batches(loader, EPOCHS)]


@pytest.mark.parametrize("age", [0, 1, 4])
def test_the_same_batches_in_the_same_order_with_the_same_seeds(age: int) -> None:
    process, expected = Process(age), in_turn()
    assert len(expected) == BATCHES
    assert [process.take() for _ in range(BATCHES)] == expected
    assert process.take() is None
    assert [(one["step"], one["rows"]) for one in process.rollouts.asked] == list(enumerate(expected, start=1))


@settings(deadline=None)
@given(
    age=st.integers(0, 4),
    course=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8),
)
def test_killed_at_any_moment_no_prompt_is_lost_or_repeated(age: int, course: list[tuple[int, int]]) -> None:
    """In each life of the run: batches before its last checkpoint, and batches after it, which the kill undoes."""
    trained: list[list[int] | None] = []
    checkpoint = None
    for saved, undone in course:
        process = Process(age, checkpoint)
        trained += [rows for _ in range(saved) if (rows := process.take()) is not None]
        checkpoint = process.checkpoint()
        for _ in range(undone):
            process.take()
    process = Process(age, checkpoint)
    while (rows := process.take()) is not None:
        trained.append(rows)
    assert trained == in_turn()


def test_what_is_begun_and_what_is_left_for_later() -> None:
    process = Process(age=2)
    process.take()
    assert len(process.rollouts.asked) == 3, "the step's own batch and those of two more"
    assert process.ahead.metrics() == {"buffer_depth": 2.0 * PER_BATCH, "buffer_in_flight": 0.0}
    process.take()
    assert len(process.rollouts.asked) == 4, "one for each that is taken"


def test_nothing_is_sampled_that_no_step_is_left_for() -> None:
    process = Process(age=4, steps=3)
    for _ in range(3):
        assert process.take()
    assert len(process.rollouts.asked) == 3
