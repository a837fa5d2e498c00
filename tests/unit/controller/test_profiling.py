"""Which steps are profiled, and what of them is shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import LoggerConfig
from megatron_grpo.controller.loop import profiled
from megatron_grpo.controller.recordings import RolloutDumps
from megatron_grpo.data.rollout_files import rollouts_file, write_rollouts
from tests.support.fake_rollouts import FakeRollouts
from tests.support.recording import RUN
from tests.support.trajectories import make_trajectory, with_learnt


def make_run(folder: Path, steps: list[int]) -> tuple[Any, list[str]]:
    told: list[str] = []
    model = SimpleNamespace(
        begin_profile=lambda: told.append("begin"), end_profile=lambda where: told.append(f"end in {Path(where).name}")
    )
    logger = SimpleNamespace(run_dir=folder, note=told.append)
    config = SimpleNamespace(logger=LoggerConfig(profile_steps=steps))
    return SimpleNamespace(config=config, logger=logger, models=lambda: [model]), told


def test_only_chosen_steps_are_profiled(tmp_path: Path) -> None:
    run, told = make_run(tmp_path, [2])
    for step in (1, 2, 3):
        with profiled(run, step):
            told.append(f"step {step}")
    assert told == [
        *["step 1", "begin", "step 2", "end in step_2"],
        f"step 2: profiles in {tmp_path / 'profiles' / 'step_2'}",
        "step 3",
    ]


def test_a_step_that_fails_is_not_hidden_by_its_profile(tmp_path: Path) -> None:
    run, told = make_run(tmp_path, [1])
    with pytest.raises(RunError, match="the engine died"), profiled(run, 1):
        raise RunError("the engine died")
    assert told == ["begin"]


def test_some_rollouts_of_a_step(tmp_path: Path) -> None:
    rows = [make_trajectory(prompt_idx=10 + group, group=group, response=f"{group}") for group in range(4)]
    write_rollouts(rollouts_file(tmp_path, 3), [(one.group, with_learnt(one, one)) for one in rows])
    rollouts: Any = FakeRollouts()
    dumps = RolloutDumps(rollouts, LoggerConfig(num_completions_to_print=3), tmp_path, RUN)
    assert [row["response"] for row in dumps.some(3)] == ["0", "1", "2"], "each to another prompt"
