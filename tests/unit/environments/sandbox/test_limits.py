"""Programs in the sandbox: what they may use, and that they and what they started end in time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.config.data_schema import LEVELS, IsolationLevel, SandboxConfig
from megatron_grpo.environments.sandbox import launcher
from megatron_grpo.environments.sandbox.sandbox import Sandbox
from tests.support.sandboxed import CONFIG, STRONGEST, isolated, require_level, run


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_reads_writes_and_ends(level: IsolationLevel) -> None:
    require_level(level)
    source = """
import os, sys
open('own.txt', 'w').write('kept')
print(open('own.txt').read(), sys.stdin.read(), sorted(os.listdir('.')))
print('to stderr', file=sys.stderr)
sys.exit(3)
"""
    finished = run(source, "given", level)
    assert finished.stdout == "kept given ['main.py', 'own.txt']\n"
    assert (finished.stderr, finished.exit_code, finished.ending) == ("to stderr\n", 3, "exited")
    assert not finished.succeeded
    assert run("pass", level=level).succeeded


@isolated
def test_any_program_runs_with_files_of_its_own() -> None:
    sandbox = Sandbox(CONFIG, STRONGEST)
    finished = sandbox.run(["/bin/sh", "-c", "cat folder/a.txt; id -u"], {"folder/a.txt": "text\n"})
    assert finished.stdout.splitlines()[0] == "text"
    assert finished.stdout.splitlines()[1] != "0"
    missing = sandbox.run(["no-such-program"])
    assert missing.exit_code == 127
    assert "cannot run no-such-program" in missing.stderr


@isolated
def test_threads_and_processes_work_up_to_the_limit() -> None:
    source = """
import multiprocessing, subprocess, threading
thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()
print(subprocess.run(['/bin/echo', 'process'], capture_output=True, text=True).stdout)
with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))
"""
    finished = run(source)
    assert finished.stdout.split() == ["thread", "process", "[1,", "2]"], finished
    assert finished.succeeded


def test_an_endless_loop_ends_with_its_time() -> None:
    finished = run("while True: pass", config=SandboxConfig(wall_time_s=1, cpu_time_s=60))
    assert finished.ending == "wall time"
    assert 0.9 < finished.seconds < 5
    assert not finished.succeeded


def test_a_process_ends_with_its_processor_time() -> None:
    finished = run("while True: pass", config=SandboxConfig(wall_time_s=60, cpu_time_s=1))
    assert finished.ending == "cpu time"
    assert finished.seconds < 30


def test_sleeping_through_a_request_to_end_does_not_help() -> None:
    source = "import signal, time\nfor s in (2, 15, 1): signal.signal(s, signal.SIG_IGN)\ntime.sleep(600)"
    assert run(source, config=SandboxConfig(wall_time_s=1)).ending == "wall time"


@isolated
def test_files_are_limited_in_size_all_together_and_in_number() -> None:
    source = "for n in range(100): open(f'{n}', 'wb').write(b'x' * (1 << 20))"
    assert "No space left" in run(source).stderr
    assert "No space left" in run("for n in range(20000): open(f'{n}', 'w').close()").stderr


@isolated
def test_a_fork_bomb_is_contained() -> None:
    for source in (
        "import os\nwhile True: os.fork()",
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    ):
        finished = run(source, config=SandboxConfig(wall_time_s=3, processes=8))
        assert not finished.succeeded
        assert finished.seconds < 20


def test_endless_output_is_cut() -> None:
    finished = run("while True: print('x' * 1000)")
    assert finished.ending == "output"
    assert len(finished.stdout) <= 16 * 1024 + 1
    assert run("import sys\nwhile True: sys.stderr.write('x' * 1000)").ending == "output"


@pytest.mark.parametrize("level", LEVELS)
def test_what_it_left_running_ends_with_it(level: IsolationLevel) -> None:
    require_level(level)
    source = """
import os, subprocess
for _ in range(3):
    subprocess.Popen(['/bin/sleep', '98765'], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/bin/sleep', ['sleep', '98765'])
    os._exit(0)
"""
    finished = run(source, level=level)
    assert finished.ending == "exited"
    assert finished.seconds < CONFIG.wall_time_s
    assert "98765" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


@isolated
def test_programs_end_with_the_process_that_runs_them() -> None:
    code = (
        "from megatron_grpo.environments.sandbox.sandbox import Sandbox\n"
        "from megatron_grpo.config.data_schema import SandboxConfig\n"
        f"Sandbox(SandboxConfig(wall_time_s=100, cpu_time_s=100), {STRONGEST!r}).run(['/bin/sleep', '87654'])\n"
    )
    root = Path(__file__).parents[4]
    running = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)})

    def sleeps() -> bool:
        return "sleep 87654" in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout

    wait_until(sleeps)
    running.kill()
    running.wait()
    wait_until(lambda: not sleeps())


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def test_a_request_to_end_that_comes_after_the_end_is_no_error() -> None:
    """As when the time of a program passes just as it has ended by itself."""
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    before = signal.getsignal(signal.SIGTERM)
    try:
        launcher._kill_on_request(ended.pid)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_program_that_kills_its_launcher_ends_with_it() -> None:
    source = """
import os, signal, time
print(os.getpid(), flush=True)
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
"""
    finished = run(source, level="limits", config=replace(CONFIG, wall_time_s=60))
    assert (finished.ending, finished.succeeded) == ("exited", False)
    path = Path("/proc", finished.stdout.strip(), "cmdline")
    assert not path.exists() or path.read_bytes() == b"", "it is gone, or waits for somebody to take leave of it"


def test_nobody_waits_for_what_has_escaped_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_grpo.environments.sandbox.sandbox.ENDING_S", 0.2)
    source = """
import os, signal, time
launcher = os.getppid()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    os.kill(launcher, signal.SIGKILL)
    time.sleep(30)
time.sleep(30)
"""
    finished = run(source, level="limits")
    os.kill(int(finished.stdout), signal.SIGKILL)
    assert finished.ending == "wall time"
