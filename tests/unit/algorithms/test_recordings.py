"""Which rollouts of a step are written, and that a step waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.algorithms.records import RolloutDumps
from megatron_grpo.batch.rollout_files import StepRecord
from megatron_grpo.config.schema import LoggerConfig
from tests.support.fake_rollouts import FakeRollouts
from tests.support.recorded_run import RUN, make_facts
from tests.support.trajectories import make_trajectory

BATCHES: dict[int, Any] = {1: object(), 2: object()}
FACTS = {step: make_facts(longest=step) for step in BATCHES}


def make(folder: Path, **keys: Any) -> tuple[RolloutDumps, FakeRollouts]:
    rollouts = FakeRollouts()
    as_pool: Any = rollouts
    return RolloutDumps(as_pool, LoggerConfig(**keys), folder, RUN), rollouts


@pytest.mark.parametrize(
    ("keys", "sample"), [({"rollouts": "all"}, None), ({"rollouts": "sample", "rollouts_sample": 5}, 5)]
)
def test_a_step_waits_for_its_own_rollouts(keys: dict[str, Any], sample: int | None, tmp_path: Path) -> None:
    dumps, rollouts = make(tmp_path, **keys)
    groups = {step: rollouts.put([[make_trajectory(prompt_idx=step)]]) for step in (1, 2)}
    for step in (1, 2):
        dumps.hold(step, groups[step], BATCHES[step], FACTS[step])
        dumps.begin()
    records = {step: StepRecord(RUN, facts) for step, facts in FACTS.items()}
    assert rollouts.dumped == [(step, groups[step], BATCHES[step], tmp_path, records[step], sample) for step in (1, 2)]
    assert rollouts.awaited == [], "the step goes on beside it"
    dumps.finish(1)
    assert rollouts.awaited == ["rollouts of step 1"]
    dumps.finish(2)
    assert rollouts.awaited == ["rollouts of step 1", "rollouts of step 2"]


def test_nothing_is_written_when_it_is_off(tmp_path: Path) -> None:
    dumps, rollouts = make(tmp_path, rollouts="off")
    dumps.hold(1, rollouts.put([[make_trajectory()]]), BATCHES[1], FACTS[1])
    dumps.begin()
    dumps.finish(1)
    assert (rollouts.dumped, rollouts.awaited) == ([], [])


@pytest.mark.parametrize("begun", [False, True])
def test_a_step_that_fails_leaves_its_rollouts(begun: bool, tmp_path: Path) -> None:
    dumps, rollouts = make(tmp_path)
    groups = rollouts.put([[make_trajectory()]])
    dumps.hold(2, groups, BATCHES[2], FACTS[2])
    assert rollouts.dumped == [], "nothing is written before it has advantages or fails"
    if begun:
        dumps.begin()
    dumps.write_all()
    assert rollouts.dumped == [(2, groups, BATCHES[2], tmp_path, StepRecord(RUN, FACTS[2]), None)]
    assert rollouts.awaited == ["rollouts of step 2"]


def test_a_step_that_is_over_leaves_nothing(tmp_path: Path) -> None:
    dumps, rollouts = make(tmp_path)
    dumps.write_all()
    groups = rollouts.put([[make_trajectory()]])
    dumps.hold(1, groups, BATCHES[1], FACTS[1])
    dumps.begin()
    dumps.finish(1)
    dumps.write_all()
    assert (len(rollouts.dumped), len(rollouts.awaited)) == (1, 1)
    off, rollouts = make(tmp_path, rollouts="off")
    off.hold(1, groups, BATCHES[1], FACTS[1])
    off.write_all()
    assert (rollouts.dumped, rollouts.awaited) == ([], [])
