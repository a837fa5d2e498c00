"""A step that reads its rollouts is the step that was recorded: same lessons, same figures, same progress."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.algorithms.context import make_save_state
from megatron_grpo.algorithms.grpo import grpo_step, sampling_step
from megatron_grpo.algorithms.records import RecordedSteps
from megatron_grpo.algorithms.step_report import StepReport
from megatron_grpo.batch.rollout_files import locate_rollouts_file, write_rollouts
from tests.support.grpo_run import EVERYTHING, Run
from tests.support.recorded_run import make_record
from tests.support.trajectories import make_trajectory

DYNAMIC = ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"]
pytestmark = pytest.mark.usefixtures("fake_ray")


def record(run: Run, folder: Path, step: int = 1) -> None:
    """Write what the run's step has begun to."""
    groups = [group.objects_ref.get() for group in run.run.dumps.groups[step]]
    rows = [(number, [(trajectory, {}) for trajectory in group]) for number, group in enumerate(groups)]
    write_rollouts(locate_rollouts_file(folder, step), rows, make_record(run.run.dumps.facts[step]).to_metadata())


def reading(folder: Path, recording: Path, *overrides: str) -> Run:
    """A run that samples nothing."""
    folder.mkdir()
    run = Run(folder, f"debug.rollouts_from={recording}", "data.val_path=null", "checkpointing=none", *overrides)
    run.run.loader = RecordedSteps(str(recording), 2)
    run.run.transport = None
    run.rollouts.answers = lambda *_: pytest.fail("something was sampled")
    return run


def lessons(run: Run) -> list[Any]:
    """Everything that the policy learnt from, in plain types."""
    return [
        (lesson.sequences, {name: lesson.entry(name) for name in lesson.tokens.fields.as_dict()})
        for lesson in run.policy.lessons
    ]


def without_refit(report: StepReport) -> dict[str, float]:
    return {name: metric for name, metric in report.metrics.items() if name not in REFIT}


REFIT = ("refit_bytes", "refit_retries", "engine_restarts")


@pytest.mark.parametrize("overrides", [[], EVERYTHING, DYNAMIC], ids=["plain", "everything", "dynamic"])
def test_it_is_the_recorded_step(overrides: list[str], tmp_path: Path) -> None:
    first = Run(tmp_path / "first", *overrides)
    if overrides is DYNAMIC:  # two groups without a signal, one beyond what fills the step
        alike = [
            make_trajectory(5, group=group, prompt_idx=group, reward=1.0, sample=i) for group in (2, 3) for i in (0, 1)
        ]
        rollouts = [make_trajectory(4, group=4, prompt_idx=4, reward=float(i), sample=i) for i in (0, 1)]
        first.dropped = alike + rollouts
    sampled = first.step()
    record(first, tmp_path / "recording")
    second = reading(tmp_path / "second", tmp_path / "recording", *overrides)
    read = second.step()
    assert lessons(second) == lessons(first)
    assert read.metrics == without_refit(sampled)
    assert second.run.state == first.run.state
    assert second.run.loader_state == first.run.loader_state
    assert second.run.dumps.facts == first.run.dumps.facts, "what trains on a recording is a recording"
    assert not set(REFIT) & read.metrics.keys()
    assert "recording" in read.timing


def test_groups_that_an_earlier_start_sampled_are_counted_once(tmp_path: Path) -> None:
    first = Run(tmp_path / "first", *DYNAMIC)
    carried = [make_trajectory(2, group=9, prompt_idx=9, sample=i, reward=float(i)) for i in (0, 1)]
    first.run.batch_cache += first.rollouts.put([carried])
    sampled = first.step()
    record(first, tmp_path / "recording")
    assert first.run.dumps.facts[1].carried == 1
    second = reading(tmp_path / "second", tmp_path / "recording", *DYNAMIC)
    assert second.step().metrics == without_refit(sampled)
    assert lessons(second) == lessons(first)


def test_it_ends_where_the_recording_does(tmp_path: Path) -> None:
    first = Run(tmp_path / "first")
    first.step()
    record(first, tmp_path / "recording")
    second = reading(tmp_path / "second", tmp_path / "recording")
    second.step()
    assert grpo_step(second.run, iter(())) is None
    assert second.run.end_of_data == f"the recording is used up: {tmp_path / 'recording'} ends with step 1"


def test_a_reward_that_was_changed_to_nothing_is_refused(tmp_path: Path) -> None:
    first = Run(tmp_path / "first")
    first.step()
    first.run.dumps.groups[1][0].objects_ref.get()[0].reward = float("nan")
    record(first, tmp_path / "recording")
    with pytest.raises(ValueError, match=r"row 1, prompt \d+, sample 0 has the reward nan"):
        reading(tmp_path / "second", tmp_path / "recording").step()


def test_sampling_alone_is_the_first_half_of_a_step(tmp_path: Path) -> None:
    full_run, half = Run(tmp_path / "whole"), Run(tmp_path / "half", "debug.train=false")
    trained = full_run.step()
    before = copy.deepcopy(half.run.state)
    assert before == make_save_state()
    report = sampling_step(half.run, half.prompts())
    assert report is not None
    assert report.metrics.items() <= {**trained.metrics, "optimizer_steps": 0.0}.items()
    assert report.metrics["valid_tokens"] == trained.metrics["valid_tokens"]
    assert (half.policy.lessons, half.policy.log) == ([], ["dump 1 begins"])
    assert half.run.dumps.facts == full_run.run.dumps.facts
    assert sampling_step(half.run, iter(())) is None
