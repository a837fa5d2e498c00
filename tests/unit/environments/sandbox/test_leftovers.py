"""A hundred programs of all kinds leave no process, no folder, no mount and no descriptor behind."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.config.data_schema import LEVELS, IsolationLevel, SandboxConfig
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.code import CodeEnvironment
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.sandbox.kernel import list_descendants
from tests.support.sandboxed import require_level

LIMITS = SandboxConfig(wall_time_s=60, cpu_time_s=1, memory_mb=200)
PROGRAMS = {
    "right": "print(sum(map(int, input().split())))",
    "wrong": "print(0)",
    "crash": "raise SystemExit(3)",
    "no Python": "def main(:",
    "memory": "kept = []\nwhile True: kept.append(bytearray(1 << 22))",
    "output": "while True: print('x' * 1000)",
    "files": "for number in range(50): open(f'{number}.txt', 'w').write('x' * 10000)",
    "folders": "import os\nos.makedirs('a/b/c')\nos.chmod('a/b', 0)",
    "processes": "import subprocess\n"
    "for _ in range(3): subprocess.Popen(['/bin/sleep', '76543'], start_new_session=True)",
    "orphan": "import os\nif os.fork() == 0:\n os.setsid()\n"
    " if os.fork() == 0: os.execv('/bin/sleep', ['sleep', '76543'])",
}
ENDLESS = "while True: pass"


def requests(programs: list[str]) -> list[EnvironmentRequest]:
    case = [{"input": "1 2", "output": "3"}]
    extra = {"answer": case, REFERENCE: str(case)}
    return [
        EnvironmentRequest(prompt="", response=program, stop_reason="stop", extra_env_info=extra)
        for program in programs
    ]


def sleeping() -> list[str]:
    """Processes of programs, wherever they hang in the tree."""
    lines = (path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit())
    return [str(line) for line in lines if line.exists() and b"76543" in line.read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[2]])
def test_nothing_is_left(level: IsolationLevel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_level(level)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        "megatron_grpo.environments.sandbox.sandbox.LEVELS",
        LEVELS[: LEVELS.index(level) + 1],
    )
    environment = CodeEnvironment(EnvironmentSettings(sandbox=replace(LIMITS, required=level)), programs_at_once=4)
    programs = [*list(PROGRAMS.values()) * 10, ENDLESS, ENDLESS]
    environment.score(requests(programs[:8]))  # starts the threads
    descriptors, mounts = os.listdir("/proc/self/fd"), Path("/proc/self/mountinfo").read_text()
    processes = list_descendants(os.getpid())
    results = environment.score(requests(programs))
    assert [result.correct for result in results] == [program == PROGRAMS["right"] for program in programs]
    assert list_descendants(os.getpid()) == processes
    assert sleeping() == []
    assert list(tmp_path.iterdir()) == []
    assert os.listdir("/proc/self/fd") == descriptors
    assert Path("/proc/self/mountinfo").read_text() == mounts
