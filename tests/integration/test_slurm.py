"""The Slurm launcher on a real Slurm of one node that is started for the test; containers are left out."""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm import NEEDS_SLURM, Slurm, start_slurm

ROOT = Path(__file__).parents[2]
pytestmark = NEEDS_SLURM


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with start_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def submit(slurm: Slurm, folder: Path, *overrides: str) -> str:
    """Submit the launcher from `folder`; returns the job's number."""
    slurm.env["PYTHON"] = sys.executable
    slurm.env["RUN_DIR"] = str(folder / "run")
    script = str(ROOT / "launchers" / "slurm_pyxis.sbatch")
    return slurm.call("sbatch", "--parsable", f"--chdir={folder}", script, *overrides)


def processes_with(word: str) -> list[str]:
    """Command lines of running processes that contain the word; ray_1 is not in ray_1k8t."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if re.search(rf"\b{re.escape(word)}\b", line):
            lines.append(line)
    return lines


def traces(job: str) -> list[str]:
    """What is still there of a job's Ray."""
    folder = Path(f"/tmp/ray_{job}")
    return processes_with(folder.name) + [str(folder)] * folder.exists()


@pytest.mark.slow
def test_quickstart_runs_under_slurm_and_leaves_nothing_behind(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "+exp=quickstart", "grpo.max_num_steps=2", "grpo.val_at_start=false")
    state = slurm.wait(job)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert state == "COMPLETED", output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert traces(job) == []


@pytest.mark.slow
def test_a_cancelled_job_leaves_nothing_behind(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "+exp=quickstart", "grpo.val_at_start=false")
    deadline = time.monotonic() + 120
    while not traces(job):
        assert time.monotonic() < deadline, "Ray did not start"
        time.sleep(0.5)
    slurm.call("scancel", job)
    assert slurm.wait(job) == "CANCELLED"
    deadline = time.monotonic() + 30  # Slurm calls a job cancelled before its last process is gone
    while traces(job):
        assert time.monotonic() < deadline, traces(job)
        time.sleep(0.5)


def test_a_mistake_ends_the_job_with_the_message(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "+exp=quickstart", "grpo.max_num_step=2")
    state = slurm.wait(job)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert state == "FAILED", output
    assert "did you mean grpo.max_num_steps?" in output
    assert "Traceback" not in output
    assert traces(job) == []
