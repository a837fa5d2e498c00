"""Whole PPO runs: what they report, and resuming both models to the last digit."""

from pathlib import Path

import pytest

from tests.integration.runs import TrainingRun, without_timing
from tests.integration.whole_runs import complete, kill_after, read_options
from tests.support.documents import undocumented

OPTIONS = read_options("ppo_run")

pytestmark = pytest.mark.slow

SHORT = OPTIONS["short"]


def ppo_run(run_dir: Path, *overrides: str) -> TrainingRun:
    return TrainingRun(run_dir, *SHORT, *overrides, recipe="quickstart_ppo")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Four steps without interruption."""
    run = complete(ppo_run(tmp_path_factory.mktemp("ppo") / "run"))
    run.assert_nothing_left()
    return run


def test_the_value_model_learns_first_and_then_the_policy(straight: TrainingRun) -> None:
    rows = straight.metrics()
    assert [row["optimizer_steps"] for row in rows] == [0, 2, 2, 2]
    assert rows[0]["value_mean"] == 0, "of the values before the step, whatever its optimizer steps have made of them"
    assert rows[1]["value_mean"] != 0
    assert all(row["value_grad_norm"] > 0 for row in rows)
    assert all("explained_variance" in row for row in rows)
    assert (straight.run_dir / "checkpoints" / "step_4" / "megatron_value" / "metadata.json").is_file()


def test_killed_and_started_again_it_ends_as_if_nothing_had_happened(straight: TrainingRun, tmp_path: Path) -> None:
    kill_after(ppo_run(tmp_path / "run"), 2)
    second = complete(ppo_run(tmp_path / "run"))
    assert "resumed after step 2" in second.log()
    assert without_timing(second.metrics()) == without_timing(straight.metrics())
    assert second.rollouts(4) == straight.rollouts(4)


def test_the_options_of_the_loop_are_those_of_grpo(tmp_path: Path) -> None:
    """Dynamic sampling, rewards scaled and shaped, truncated responses filtered, a moving reference: with a critic."""
    run = complete(ppo_run(tmp_path / "run", *OPTIONS["the_options_of_the_loop_are_those_of_grpo"]))
    for row in run.metrics():
        assert row["groups_without_signal"] == 0
        assert row["dynamic_sampling_gen_batches"] >= 1
        assert row["num_masked_seqs"] == 0
        assert 0 < row["valid_tokens"] <= 64 * row["response_length_max"]
        assert -1 <= row["return_mean"] <= 1, "of the scaled rewards"
        assert undocumented(row.keys() - {"step", "timing", "throughput"}) == set()
    assert run.metrics()[-1]["kl_penalty"] > 0


def test_a_checkpoint_of_grpo_is_refused(straight: TrainingRun, tmp_path: Path) -> None:
    grpo = complete(
        TrainingRun(tmp_path / "grpo", "grpo.max_num_steps=1", "grpo.num_prompts_per_step=8", "grpo.val_at_end=false")
    )
    run = ppo_run(tmp_path / "run", f"checkpointing.resume={grpo.run_dir}/checkpoints/step_1")
    assert run.finish() == 2
    assert "is not a checkpoint of PPO: it has no value model" in run.log()
