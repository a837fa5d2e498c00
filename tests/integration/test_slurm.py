"""The Slurm launcher on a real Slurm of one node that is started for the test; containers are left out."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import read_programs

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="Slurm is not installed (Debian: slurm-wlm, munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a Slurm of one's own needs root"),
]

SLURM_CONF = read_programs("slurm")["slurm_conf"]


class Slurm:
    """A running Slurm and how to talk to it."""

    def __init__(self, folder: Path) -> None:
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        """Output of a Slurm command."""
        process = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert process.returncode == 0, f"{' '.join(command)}: {process.stderr}"
        return process.stdout.strip()

    def state(self, job: str) -> str:
        """State of a job, "COMPLETED" for example."""
        return self.call("scontrol", "show", "job", job).split("JobState=")[1].split()[0]

    def wait(self, job: str) -> str:
        """State of a job once it has ended, for which a busy machine has five minutes."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            state = self.state(job)
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return state
            time.sleep(1)
        return self.state(job)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    conf = SLURM_CONF.format(
        host=socket.gethostname(),
        folder=folder,
        cpus=os.cpu_count(),
        controller_port=free_port(),
        node_port=free_port(),
    )
    (folder / "slurm.conf").write_text(conf)
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    daemons: list[subprocess.Popen[bytes]] = []
    slurm = Slurm(folder)
    log = (folder / "daemons.log").open("wb")
    try:
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemons.append(subprocess.Popen(command, env=slurm.env, stdout=log, stderr=log))
            time.sleep(1)
        deadline = time.monotonic() + 60
        while slurm.call("sinfo", "--noheader", "--format=%T") != "idle":
            assert time.monotonic() < deadline, "the node did not come up"
            assert all(daemon.poll() is None for daemon in daemons), (folder / "daemons.log").read_text()
            time.sleep(0.5)
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            daemon.wait(timeout=20)
        log.close()


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
    assert state == "FAILED"
    assert "did you mean grpo.max_num_steps?" in output
    assert "Traceback" not in output
    assert traces(job) == []
