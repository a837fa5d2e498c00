"""Whole runs of distillation: learning from a teacher, other forms of it, and a resume to the last digit."""

from pathlib import Path

import pytest

from tests.integration.runs import TrainingRun, without_timing
from tests.integration.whole_runs import complete, kill_after, read_options
from tests.support.documents import undocumented

OPTIONS = read_options("distillation_run")

pytestmark = pytest.mark.slow

SHORT = OPTIONS["short"]


def distillation_run(run_dir: Path, *overrides: str) -> TrainingRun:
    return TrainingRun(run_dir, *SHORT, *overrides, recipe="quickstart_distillation")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Twelve steps without interruption, with a teacher in a layout of its own."""
    run = complete(distillation_run(tmp_path_factory.mktemp("distillation") / "run", "teacher.parallel.data=2"))
    run.assert_nothing_left()
    return run


def test_the_policy_follows_its_teacher(straight: TrainingRun) -> None:
    rows = straight.metrics()
    assert undocumented(name for name in rows[0] if name not in ("step", "timing", "throughput")) == set()
    assert rows[-1]["teacher_divergence"] < 0.9 * rows[0]["teacher_divergence"]
    assert all(row["loss"] == row["teacher_divergence"] for row in rows)
    assert not (straight.run_dir / "checkpoints" / "step_12" / "megatron_teacher").exists()


def test_killed_and_started_again_it_ends_as_if_nothing_had_happened(straight: TrainingRun, tmp_path: Path) -> None:
    kill_after(distillation_run(tmp_path / "run", "teacher.parallel.data=2"), 2)
    second = complete(distillation_run(tmp_path / "run", "teacher.parallel.data=2"))
    assert "resumed after step 2" in second.log()
    assert without_timing(second.metrics()) == without_timing(straight.metrics())
    assert second.rollouts(12) == straight.rollouts(12)


def test_all_tokens_as_the_likeliest_change_nothing(straight: TrainingRun, tmp_path: Path) -> None:
    run = complete(distillation_run(tmp_path / "run", "teacher.parallel.tensor=2", "distillation.topk_logits_k=16"))
    first, expected = run.metrics()[0], straight.metrics()[0]
    assert first["teacher_divergence"] == pytest.approx(expected["teacher_divergence"], rel=1e-5)
    assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_asynchronous_on_shared_devices_without_rewards(tmp_path: Path) -> None:
    run = complete(distillation_run(tmp_path / "run", *OPTIONS["asynchronous_on_shared_devices_without_rewards"]))
    rows = run.metrics()
    assert "reward" not in rows[0]
    assert rows[-1]["teacher_divergence"] < rows[0]["teacher_divergence"]
    assert "no reward function gave a reward" not in run.log()


def test_beside_rewards_with_a_teacher_for_each_task(tmp_path: Path) -> None:
    run = complete(distillation_run(tmp_path / "run", *OPTIONS["beside_rewards_with_a_teacher_for_each_task"]))
    assert all("policy_loss" in row for row in run.metrics())
