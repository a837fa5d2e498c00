"""Which rollouts of a step are written, and that a step waits for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.algorithms.records import SAMPLE_ROWS, SAMPLE_TOKENS, SAMPLED_STEPS, RolloutDumps, count_within
from megatron_grpo.batch.rollout_files import StepRecord, read_rollouts
from megatron_grpo.config.schema import LoggerConfig
from tests.support.fake_rollouts import FakeRollouts
from tests.support.recorded_run import RUN, make_facts
from tests.support.trajectories import make_trajectory, with_learnt

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


@pytest.mark.parametrize("last", [1, 2, 127, 128, 129, 1000, 10**6])
@pytest.mark.parametrize("period", [1, 7, 50])
def test_the_steps_whose_samples_are_kept_are_few_and_spread(last: int, period: int, tmp_path: Path) -> None:
    dumps, _ = make(tmp_path)
    dumps = RolloutDumps(dumps._rollouts, LoggerConfig(), tmp_path, replace(RUN, max_num_steps=last))
    steps = [step for step in range(0, last + 1, period) if dumps.is_sampled(step, period)]
    assert len(steps) <= SAMPLED_STEPS + 2
    assert steps[0] == 0
    assert dumps.is_sampled(last, period)
    gaps = {later - earlier for earlier, later in pairwise(steps[1:])}
    assert len(gaps) <= 3, "the first, the regular one, and that to the end"
    assert not any(make(tmp_path, rollouts="off")[0].is_sampled(step) for step in (0, 1, last))


def test_rows_that_are_kept_have_a_bounded_number_of_tokens() -> None:
    assert count_within([10] * 1000, SAMPLE_ROWS, SAMPLE_TOKENS) == SAMPLE_ROWS
    assert count_within([10] * 3, SAMPLE_ROWS, SAMPLE_TOKENS) == 3
    assert count_within([SAMPLE_TOKENS // 4] * 1000, SAMPLE_ROWS, SAMPLE_TOKENS) == 4
    assert count_within([10**7] * 5, SAMPLE_ROWS, SAMPLE_TOKENS) == 1, "one, whatever its length"


def test_responses_of_a_validation_are_written_beside_the_rollouts(tmp_path: Path) -> None:
    dumps, rollouts = make(tmp_path)
    groups = rollouts.put([[make_trajectory(prompt_idx=number)] for number in range(1000)])
    dumps.write_validation(2, groups, 2)
    ((step, written, batch, folder, record, count),) = rollouts.dumped
    assert (step, written, batch, folder, count) == (2, groups, None, tmp_path, SAMPLE_ROWS)
    assert (record.run.prompts_per_step, record.run.samples_per_prompt) == (1000, 1)
    assert (rollouts.dumped_into, rollouts.awaited) == (["validation"], ["rollouts of step 2"])
    off, rollouts = make(tmp_path, rollouts="off")
    off.write_validation(2, groups, 2)
    assert rollouts.dumped == []


def test_learnt_rows_are_read_as_rollouts(tmp_path: Path) -> None:
    dumps, _ = make(tmp_path)
    dumps.write_learnt(1, [(5, with_learnt(make_trajectory(prompt_idx=7, columns={"level": "3"})))])
    (row,) = read_rollouts(tmp_path, kind="rows")
    assert (row["step"], row["group"], row["prompt_idx"], row["columns"]) == (1, 5, 7, {"level": "3"})
    with pytest.raises(FileNotFoundError, match="has no rollouts"):
        read_rollouts(tmp_path)
