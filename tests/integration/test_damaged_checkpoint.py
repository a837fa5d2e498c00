"""Real runs on a bad day: checkpoints that are damaged, a machine that fails between learning and publishing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo import export
from megatron_grpo.config.command_line import MISTAKE
from megatron_grpo.config.schema import CheckpointingConfig
from megatron_grpo.run.checkpoints import Checkpointer
from tests.integration.runs import TrainingRun, without_timing
from tests.integration.whole_runs import complete, read_options
from tests.support.damage import delete, files_of, flip, truncate

OPTIONS = read_options("damaged_checkpoint")

pytestmark = pytest.mark.slow

STEPS, RESPONSES = 3, 64


def make_run(run_dir: Path, job_folder: Path) -> TrainingRun:
    job = job_folder / "job.yaml"
    function = "tests.integration.bad_rewards.right_and_then_the_engine_is_gone"
    job.write_text(
        yaml.safe_dump({"environment": {"name": "addition", "type": "reward_functions", "reward_funcs": [function]}})
    )
    return TrainingRun(run_dir, f"job={job}", f"grpo.max_num_steps={STEPS}", *OPTIONS["make_run"])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Three steps without interruption, each with its checkpoint."""
    folder = tmp_path_factory.mktemp("straight")
    return complete(make_run(folder / "run", folder))


def copy_of(run: TrainingRun, run_dir: Path, *steps: int) -> Path:
    """The run's folder with these checkpoints only; the folder of its checkpoints."""
    other_steps = [f"step_{step}" for step in range(1, STEPS + 1) if step not in steps]
    shutil.copytree(run.run_dir, run_dir, ignore=shutil.ignore_patterns(*other_steps), symlinks=True)
    return run_dir / "checkpoints"


def test_damage_to_any_real_file_is_named_and_the_previous_checkpoint_taken(
    straight: TrainingRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = files_of(straight.run_dir / "checkpoints" / "step_3")
    assert {name for name in names if name.endswith(".distcp")}
    for name in names:
        for damage in (flip, truncate, delete):
            folder = copy_of(straight, tmp_path / "run", 2, 3)
            damage(folder / "step_3" / name)
            arguments = [f"checkpoint={folder / 'step_3'}", f"output={tmp_path / 'out'}"]
            assert export.main(arguments) == MISTAKE, f"{name}: {damage.__name__}"
            assert str(folder / "step_3" / name) in capsys.readouterr().err
            assert not (tmp_path / "out").exists()
            assert Checkpointer(tmp_path / "run", CheckpointingConfig()).find_start() == folder / "step_2"
            assert str(folder / "step_3" / name) in capsys.readouterr().err
            shutil.rmtree(tmp_path / "run")


def test_a_run_goes_on_from_the_previous_checkpoint_as_if_nothing_had_happened(
    straight: TrainingRun, tmp_path: Path
) -> None:
    folder = copy_of(straight, tmp_path / "run", 1, 2)
    weights = next((folder / "step_2" / "megatron").glob("*.distcp"))
    flip(weights)
    resumed = complete(make_run(tmp_path / "run", tmp_path))
    assert f"{weights} is damaged: its content is not what was written" in resumed.log()
    assert "step_2 is set aside as damaged_step_2" in resumed.log()
    assert "resumed after step 1" in resumed.log()
    assert without_timing(resumed.metrics()) == without_timing(straight.metrics())
    assert sorted(entry.name for entry in folder.iterdir()) == ["damaged_step_2", "step_1", "step_2", "step_3"]


def test_without_an_intact_checkpoint_the_run_stops_before_it_starts(straight: TrainingRun, tmp_path: Path) -> None:
    folder = copy_of(straight, tmp_path / "run", 3)
    delete(folder / "step_3" / "manifest.json")
    resumed = make_run(tmp_path / "run", tmp_path)
    assert resumed.finish(timeout_s=60) == 2, resumed.log()
    assert f"finds no intact checkpoint in {folder}" in resumed.log()
    assert f"{folder}/step_3/manifest.json is missing" in resumed.log()
    assert "Traceback" not in resumed.log()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (straight.run_dir / "metrics.jsonl").read_bytes()


def test_a_step_whose_weights_could_not_be_published_is_not_lost(
    straight: TrainingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies when the second step is scored, and is not replaced: the policy learns, and the refit fails."""
    monkeypatch.setenv("KILL_AFTER", f"{2 * RESPONSES}:{tmp_path / 'scored'}")
    broken = make_run(tmp_path / "run", tmp_path)
    assert broken.finish() == 1, broken.log()
    assert "run failed: refit of version 2: " in broken.log(), broken.log()
    assert "Traceback" not in broken.log(), broken.log()
    broken.assert_nothing_left()
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir(), broken.log()
    monkeypatch.delenv("KILL_AFTER")
    resumed = complete(make_run(tmp_path / "run", tmp_path))
    assert "resumed after step 2" in resumed.log()
    assert as_if_published(resumed.metrics()) == as_if_published(straight.metrics())


def as_if_published(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is known only of weights that were published."""
    of_refits = ("refit_bytes", "refit_retries", "engine_restarts")
    return [{key: value for key, value in row.items() if key not in of_refits} for row in without_timing(rows)]
