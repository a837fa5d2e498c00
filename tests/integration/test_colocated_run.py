"""Whole runs whose engines share the devices of the models: the order of events changes, and no number does."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import SHORT, TrainingRun, read_jsonl, without_timing
from tests.integration.whole_runs import kill_after, read_options

pytestmark = pytest.mark.slow

OPTIONS = read_options("colocated_run")

COLOCATED = "generation.placement=colocated"
EVENTS = {"sleep", "wake", "offload", "onload"}


def numbers(run: TrainingRun) -> list[dict[str, Any]]:
    """All metrics by step, but for the clock's, and for the bytes of refits, which depend on who sends."""
    return [{key: value for key, value in row.items() if key != "refit_bytes"} for row in without_timing(run.metrics())]


def validations(run: TrainingRun) -> list[dict[str, Any]]:
    """All that a run validated, but for the clock's figures."""
    return without_timing(read_jsonl(run.run_dir / "validation.jsonl"))


def expect_same_numbers(first: TrainingRun, second: TrainingRun) -> None:
    """In all steps and in all validations."""
    assert numbers(first) == numbers(second)
    assert validations(first) == validations(second)


def phases(run: TrainingRun) -> list[set[str]]:
    """Of each step, the names of its phases."""
    return [set(row["timing"]) for row in run.metrics()]


def finish(run: TrainingRun) -> TrainingRun:
    assert run.finish() == 0, run.log()
    run.assert_nothing_left()
    return run


def test_a_run_that_was_apart_goes_on_in_turn_with_the_same_numbers(straight_run: TrainingRun, tmp_path: Path) -> None:
    resume = f"checkpointing.resume={straight_run.run_dir}/checkpoints/step_3"
    together = finish(TrainingRun(tmp_path / "run", *SHORT, COLOCATED, resume))
    assert numbers(together) == numbers(straight_run)[3:]
    assert validations(together) == validations(straight_run)[-1:]
    assert together.rollouts(6) == straight_run.rollouts(6)
    assert all(names.isdisjoint(EVENTS) for names in phases(straight_run))
    assert all(names >= EVENTS for names in phases(together))


def test_killed_and_continued_in_turn_a_run_has_the_same_numbers(straight_run: TrainingRun, tmp_path: Path) -> None:
    kill_after(TrainingRun(tmp_path / "run", *SHORT, COLOCATED), 3)
    second = finish(TrainingRun(tmp_path / "run", *SHORT, COLOCATED))
    assert "resumed after step 3" in second.log()
    expect_same_numbers(second, straight_run)


def test_a_value_model_shares_the_devices_too(tmp_path: Path) -> None:
    """PPO with a reference policy that moves, both models saved in the background."""
    options = (*(option.replace("grpo.", "ppo.") for option in SHORT), *OPTIONS["a_value_model_shares_the_devices_too"])
    apart = finish(TrainingRun(tmp_path / "apart", *options, recipe="quickstart_ppo"))
    together = finish(TrainingRun(tmp_path / "together", *options, COLOCATED, recipe="quickstart_ppo"))
    expect_same_numbers(together, apart)
    again = TrainingRun(
        tmp_path / "again",
        *options,
        COLOCATED,
        f"checkpointing.resume={together.run_dir}/checkpoints/step_3",
        recipe="quickstart_ppo",
    )
    assert numbers(finish(again)) == numbers(apart)[3:]


def test_half_precision_optimizer_state_of_its_own_moves_too(tmp_path: Path) -> None:
    """With bfloat16 weights the optimizer has float32 copies, and two replicas each a part of its state."""
    options = (*SHORT, "policy.precision=bfloat16", "policy.parallel.pipeline=1", "policy.parallel.data=2")
    apart = finish(TrainingRun(tmp_path / "apart", *options))
    together = finish(TrainingRun(tmp_path / "together", *options, COLOCATED))
    expect_same_numbers(together, apart)
