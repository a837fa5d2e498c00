"""Which steps are profiled, and what of them is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.algorithms.records import RolloutDumps
from megatron_grpo.batch.rollout_files import locate_rollouts_file, write_rollouts
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import LoggerConfig
from tests.support.fake_rollouts import FakeRollouts
from tests.support.loop_run import LIMITS, Run
from tests.support.recorded_run import RUN
from tests.support.trajectories import make_trajectory, with_learnt


def make_run(folder: Path, steps: list[int]) -> tuple[Run, list[str]]:
    run = Run(folder, replace(LIMITS, max_num_steps=3))
    model = SimpleNamespace(
        begin_profile=lambda: run.logged.append("begin"),
        end_profile=lambda where: run.logged.append(f"end in {Path(where).name}"),
        save_checkpoint=lambda *_, **__: {},
    )
    run.config.logger.profile_steps = steps
    run.logger.run_dir = folder
    run.models = {"megatron": model}
    return run, run.logged


def test_only_chosen_steps_are_profiled(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, [2])
    run.train()
    about_profiles = [text for text in log if text.startswith(("begin", "end in", "dump", "step 2: profiles"))]
    assert about_profiles == [
        *["dump 1 begins", "dump 1 is there", "begin", "dump 2 begins", "end in step_2"],
        f"step 2: profiles in {tmp_path / 'profiles' / 'step_2'}",
        *["dump 2 is there", "dump 3 begins", "dump 3 is there"],
    ]


def test_a_step_that_fails_is_not_hidden_by_its_profile(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, [1])
    with pytest.raises(RunError, match="the engine died"):
        run.train(steps=0, error=RunError("the engine died"))
    assert [text for text in log if text.startswith(("begin", "end in"))] == ["begin"]


def test_some_rollouts_of_a_step(tmp_path: Path) -> None:
    rows = [make_trajectory(prompt_idx=10 + group, group=group, response=f"{group}") for group in range(4)]
    write_rollouts(
        locate_rollouts_file(tmp_path, 3), [(rollout.group, with_learnt(rollout, rollout)) for rollout in rows]
    )
    rollouts: Any = FakeRollouts()
    dumps = RolloutDumps(rollouts, LoggerConfig(num_completions_to_print=3), tmp_path, RUN)
    assert [row["response"] for row in dumps.read_rows(3)] == ["0", "1", "2"], "each to another prompt"
