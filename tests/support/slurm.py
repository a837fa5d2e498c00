"""A Slurm of its own for a test: its daemons on this machine, with as many nodes as it asks for."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.programs import read_programs

NEEDS_SLURM = [
    pytest.mark.slurm,
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="Slurm is not installed (Debian: slurm-wlm, munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a Slurm of one's own needs root"),
]
SLURM_CONF = read_programs("slurm")["slurm_conf"]
WAITING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")


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

    def wait(self, job: str, seconds: float = 300) -> str:
        """State of a job once it has ended, for which a busy machine has five minutes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = self.state(job)
            if state not in WAITING:
                return state
            time.sleep(1)
        return self.state(job)


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def start_slurm(folder: Path, nodes: int = 1) -> Iterator[Slurm]:
    """Run a Slurm whose nodes n0, n1, ... are all this machine."""
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    names = [f"n{number}" for number in range(nodes)]
    lines = []
    for name in names:
        (folder / f"spool_{name}").mkdir()
        address = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()}"
        lines.append(f"NodeName={name} {address} CPUs={os.cpu_count()} State=UNKNOWN")
    conf = SLURM_CONF.format(
        host=socket.gethostname(), folder=folder, nodes="\n".join(lines), controller_port=free_port()
    )
    (folder / "slurm.conf").write_text(conf)
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    daemons: list[subprocess.Popen[bytes]] = []
    slurm = Slurm(folder)
    log = (folder / "daemons.log").open("wb")
    try:
        for command in (munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in names)):
            daemons.append(subprocess.Popen(command, env=slurm.env, stdout=log, stderr=log))
            time.sleep(1)
        deadline = time.monotonic() + 60
        while slurm.call("sinfo", "--noheader", "--format=%T") != "idle":
            assert time.monotonic() < deadline, "the nodes did not come up"
            assert all(daemon.poll() is None for daemon in daemons), (folder / "daemons.log").read_text()
            time.sleep(0.5)
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            daemon.wait(timeout=20)
        log.close()
