"""Whole runs whose engines share the devices of the models: the order of events changes, and no number does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import TrainingRun, read_jsonl, without_timing

COLOCATED = "generation.placement=colocated"
SHORT = (
    "grpo.max_num_steps=4",
    "grpo.val_period=2",
    "grpo.max_val_samples=64",
    "grpo.num_prompts_per_step=16",
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=null",
)
EVENTS = {"sleep", "wake", "offload", "onload"}


def numbers(run: TrainingRun) -> list[dict[str, Any]]:
    """All metrics by step, but for the clock's, and for the bytes of refits, which depend on who sends."""
    return [{key: value for key, value in row.items() if key != "refit_bytes"} for row in without_timing(run.metrics())]


def same_numbers(one: TrainingRun, other: TrainingRun) -> None:
    """In all steps and in all validations."""
    assert numbers(one) == numbers(other)
    rows = [without_timing(read_jsonl(run.run_dir / "validation.jsonl")) for run in (one, other)]
    assert rows[0] == rows[1]


def phases(run: TrainingRun) -> list[set[str]]:
    """Of each step, the names of its phases."""
    return [set(row["timing"]) for row in run.metrics()]


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Four steps with engines that never sleep, a validation and a checkpoint in the middle."""
    return finished(TrainingRun(tmp_path_factory.mktemp("separate") / "run", *SHORT))


def finished(run: TrainingRun) -> TrainingRun:
    assert run.finish() == 0, run.log()
    run.assert_nothing_left()
    return run


def test_in_turn_on_the_same_devices_a_run_has_the_same_numbers(separate: TrainingRun, tmp_path: Path) -> None:
    """Killed after its second step and continued."""
    first = TrainingRun(tmp_path / "run", *SHORT, COLOCATED)
    first.start()
    first.wait_for(lambda: (first.run_dir / "checkpoints" / "step_2").exists())
    first.kill()
    first.assert_nothing_left()
    second = finished(TrainingRun(tmp_path / "run", *SHORT, COLOCATED))
    assert "resumed after step 2" in second.log()
    same_numbers(second, separate)
    assert second.rollouts(4) == separate.rollouts(4)
    assert all(names.isdisjoint(EVENTS) for names in phases(separate))
    assert all(names >= EVENTS for names in phases(second))


@pytest.mark.slow
def test_a_value_model_shares_the_devices_too(tmp_path: Path) -> None:
    """PPO with a reference policy that moves, both models saved in the background."""
    options = (
        *(option.replace("grpo.", "ppo.") for option in SHORT),
        "ppo.policy_training_start_step=1",
        "ppo.num_prompts_per_step=64",
        "ppo.skip_reference_policy_logprobs_calculation=false",
        "loss_fn.reference_policy_kl_penalty=0.02",
        "ppo.sync_ref_model=true",
        "ppo.ref_model_sync_steps=2",
        "checkpointing.async_save=true",
    )
    apart = finished(TrainingRun(tmp_path / "apart", *options, recipe="quickstart_ppo"))
    together = finished(TrainingRun(tmp_path / "together", *options, COLOCATED, recipe="quickstart_ppo"))
    same_numbers(together, apart)
    again = TrainingRun(
        tmp_path / "again",
        *options,
        COLOCATED,
        f"checkpointing.resume={together.run_dir}/checkpoints/step_2",
        recipe="quickstart_ppo",
    )
    assert numbers(finished(again)) == numbers(apart)[2:]


@pytest.mark.slow
def test_half_precision_optimizer_state_of_its_own_moves_too(tmp_path: Path) -> None:
    """With bfloat16 weights the optimizer has float32 copies, and two replicas each a part of its state."""
    options = (*SHORT, "policy.precision=bfloat16", "policy.parallel.pipeline=1", "policy.parallel.data=2")
    apart = finished(TrainingRun(tmp_path / "apart", *options))
    together = finished(TrainingRun(tmp_path / "together", *options, COLOCATED))
    same_numbers(together, apart)
