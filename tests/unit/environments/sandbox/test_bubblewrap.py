"""Programs in the sandbox that bubblewrap makes for an ordinary user, and when it is asked to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron_grpo.config.data_schema import LEVELS, Level, SandboxConfig
from megatron_grpo.environments.sandbox.kernel import descendants
from megatron_grpo.environments.sandbox.sandbox import Finished, Sandbox, SandboxUnavailableError, open_sandbox
from tests.support.ordinary_user import as_ordinary_user

BUBBLEWRAP = shutil.which("bwrap")
PYTHON = "/usr/bin/python3"
CONFIG = SandboxConfig(wall_time_s=8, memory_mb=200, folder_mb=8, processes=8)
SEEN = """
import os, sys
open('own.txt', 'w').write('kept')
print(os.getuid(), os.getcwd(), sorted(os.listdir('.')), len(os.environ), sys.stdin.read())
sys.exit(3)
"""
SOURCES = {
    "network": "import socket; socket.create_connection(('127.0.0.1', 80), timeout=2)",
    "write": "open('/usr/mark', 'w')",
    "write to its modules": "open('/sandbox/mark', 'w')",
    "read": f"open({__file__!r})",
    "fork bomb": "import os\nwhile True: os.fork()",
    "files": "for n in range(100): open(f'{n}', 'wb').write(b'x' * (1 << 20))",
    "shared memory": "open('/dev/shm/x', 'wb').write(b'x' * (1 << 24))",
    "namespaces": "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000) != 0)",
    "other processes": f"import os; os.kill({os.getpid()}, 0)",
}
LEFT_RUNNING = "import subprocess\nfor _ in range(3): subprocess.Popen(['/bin/sleep', '600'], start_new_session=True)"


def works(level: Level) -> bool:
    """Whether an ordinary user gets a sandbox from bubblewrap here."""

    def ran() -> bool:
        try:
            return Sandbox(CONFIG, level, PYTHON, BUBBLEWRAP).run_python("pass").succeeded
        except SandboxUnavailableError:
            return False

    readable = os.access(Path(__file__).parents[4], os.X_OK | os.R_OK)
    return BUBBLEWRAP is not None and Path(PYTHON).exists() and readable and bool(as_ordinary_user(ran))


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_program_is_kept_apart(level: Level) -> None:
    if not works(level):
        pytest.skip("no bubblewrap that an ordinary user may run")

    def outcomes() -> tuple[Finished, dict[str, bool], Finished, list[int]]:
        sandbox = Sandbox(CONFIG, level, PYTHON, BUBBLEWRAP)
        seen = sandbox.run_python(SEEN, "given")
        ran = {name: sandbox.run_python(source).succeeded for name, source in SOURCES.items()}
        return seen, ran, sandbox.run_python(LEFT_RUNNING), descendants(os.getpid())

    seen, ran, left_running, left = as_ordinary_user(outcomes)
    assert seen.stdout.startswith("1000 /program ['main.py', 'own.txt'] 4"), seen
    assert seen.stdout.endswith(" given\n")
    assert (seen.ending, seen.exit_code) == ("exited", 3)
    assert not any(ran.values()), ran
    assert left_running.succeeded
    assert left_running.seconds < CONFIG.wall_time_s
    assert left == []


def test_an_endless_program_ends_with_its_time() -> None:
    if not works("filtered"):
        pytest.skip("no bubblewrap that an ordinary user may run")

    def outcome() -> tuple[Finished, list[int]]:
        sandbox = Sandbox(SandboxConfig(wall_time_s=1), "filtered", PYTHON, BUBBLEWRAP)
        return sandbox.run_python("while True: pass"), descendants(os.getpid())

    finished, left = as_ordinary_user(outcome)
    assert finished.ending == "wall time"
    assert left == []


def test_what_keeps_bubblewrap_from_starting_it_is_told(tmp_path: Path) -> None:
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho bwrap: not on this machine >&2\nexit 1\n")
    refusing.chmod(0o755)
    with pytest.raises(SandboxUnavailableError, match="bubblewrap did not start it: bwrap: not on this machine"):
        Sandbox(CONFIG, "filtered", bubblewrap=str(refusing)).run_python("pass")


@pytest.mark.parametrize(("user", "used"), [(1000, "/usr/bin/bwrap"), (0, None)])
def test_it_is_asked_where_the_kernel_refuses_and_never_by_root(
    monkeypatch: pytest.MonkeyPatch, user: int, used: str | None
) -> None:
    monkeypatch.setattr("megatron_grpo.environments.sandbox.sandbox.os.geteuid", lambda: user)
    monkeypatch.setattr("megatron_grpo.environments.sandbox.sandbox.shutil.which", lambda *_, **__: "/usr/bin/bwrap")
    monkeypatch.setattr("megatron_grpo.environments.sandbox.sandbox._why_not", _only_with_bubblewrap)
    sandbox = open_sandbox(SandboxConfig(required="limits"))
    assert (sandbox.level, sandbox.bubblewrap) == (("filtered", used) if used else ("limits", None))
    monkeypatch.setattr("megatron_grpo.environments.sandbox.sandbox._why_not", lambda sandbox: "unshare: not permitted")
    with pytest.raises(SandboxUnavailableError) as refused:
        open_sandbox(SandboxConfig())
    assert ("with bubblewrap: unshare" in str(refused.value)) == (used is not None)


def _only_with_bubblewrap(sandbox: Sandbox) -> str | None:
    works_here = sandbox.level == "limits" or sandbox.bubblewrap is not None
    return None if works_here else "unshare: Operation not permitted"
