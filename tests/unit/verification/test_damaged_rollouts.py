"""Commands that read a run's rollouts name a file that is damaged, say what to do, and exit with 2."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatron_grpo import doctor, replay, report
from megatron_grpo.batch.rollout_files import locate_rollouts_file, read_recorded_rollouts, read_rollouts
from megatron_grpo.planning.generation_cost import read_recorded_lengths
from tests.support.recorded_run import make_recorded_run


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def overwritten(file: Path) -> None:
    """The contents of a column are gone, the metadata at the end is not."""
    content = bytearray(file.read_bytes())
    content[4 : len(content) // 3] = bytes(len(content) // 3 - 4)
    file.write_bytes(content)


def without_a_column(file: Path) -> None:
    pq.write_table(pq.read_table(file).drop_columns(["logprobs"]), file)


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recorded_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run_dir(recorded_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(recorded_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("damage", [cut_off, empty, overwritten, without_a_column])
@pytest.mark.parametrize(
    ("command", "arguments"), [(doctor.main, ["step=1"]), (replay.main, ["step=1", "device=cpu"]), (report.main, [])]
)
def test_commands_name_a_damaged_file(
    damage: Callable[[Path], None],
    command: Callable[[Sequence[str]], int],
    arguments: list[str],
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = locate_rollouts_file(run_dir, 1)
    damage(file)
    assert command([str(run_dir), *arguments]) == 2
    told = capsys.readouterr().err
    assert f"{file} is damaged or was not written to its end: " in told
    assert "copy it again from where the run wrote it, or move it out" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("damage", [cut_off, empty, overwritten, without_a_column])
def test_functions_name_a_damaged_file(damage: Callable[[Path], None], run_dir: Path) -> None:
    file = locate_rollouts_file(run_dir, 1)
    damage(file)
    for read in (lambda: list(read_rollouts(run_dir, 1)), lambda: read_recorded_lengths(run_dir, 8)):
        with pytest.raises(ValueError, match=f"^{file} is damaged or was not written to its end: "):
            read()
    with pytest.raises(ValueError, match=r"^(is damaged or was not written to its end: |was written by )"):
        read_recorded_rollouts(file)
