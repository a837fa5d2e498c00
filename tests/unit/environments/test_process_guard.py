"""What an environment starts ends with it: servers that ignore their end, and processes that forked away."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_grpo.environments.process_guard import NOT_FOUND, wrap_command

# Ignores SIGTERM and the end of its input. One child has a session and nothing of its environment, the other forked
# away twice, closed all files and ignores SIGTERM too.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True, env={})
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        os.execvp("sleep", ["sleep", sys.argv[1]])
    os._exit(0)
os.wait()
print("up", flush=True)
time.sleep(1000)
"""

# Starts processes as user code does, then is killed: by another program, forked without one, and forked twice.
ENVIRONMENT = """
import multiprocessing, os, subprocess, sys, time
from megatron_grpo.environments.process_guard import start_guard
start_guard()
subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True)
subprocess.Popen(["sh", "-c", "setsid sh -c 'trap \\"\\" TERM HUP; (sleep \\"$0\\"; :)' $0 & ", sys.argv[1]])
fork = multiprocessing.get_context("fork")
fork.Process(target=time.sleep, args=(1000,)).start()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
print("up", flush=True)
time.sleep(1000)
"""


# Four processes, each of which forks and ends, again and again: none of them is there for long. For 20 s at most.
FORKING = """
import os, sys, time
if sys.argv[2:]:
    from megatron_grpo.environments.process_guard import start_guard
    start_guard()
end = time.monotonic() + 20
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
        os._exit(0)
print("up", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    """A number that all processes of a test have in their command lines."""
    mark = f"1{os.getpid()}{time.monotonic_ns() % 10**6:06}"
    yield mark
    for pid in find(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def find(mark: str) -> list[int]:
    pids = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                pids.append(int(name))
        except OSError:
            pass
    return pids


def require_running(mark: str, count: int) -> None:
    """A process has no command line for a moment while it becomes another program."""
    deadline = time.monotonic() + 60
    while len(find(mark)) != count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(find(mark)) == count


def require_gone(mark: str) -> None:
    deadline = time.monotonic() + 60
    while find(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not find(mark)


def start(command: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("end", [subprocess.Popen.kill, subprocess.Popen.terminate], ids=["killed", "terminated"])
def test_a_command_that_ignores_its_end_ends_with_what_it_started(
    mark: str, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    process = start(wrap_command([sys.executable, "-c", STUBBORN, mark]))
    require_running(mark, 5)  # the guard's two, the command and its two
    end(process)
    process.wait(10)
    require_gone(mark)


def test_a_command_ends_with_the_process_that_started_it(mark: str) -> None:
    program = (
        "import subprocess, sys, time; from megatron_grpo.environments.process_guard import wrap_command\n"
        f"process = subprocess.Popen(wrap_command([sys.executable, '-c', {STUBBORN!r}, {mark!r}]))\n"
        "time.sleep(1000)"
    )
    process = start([sys.executable, "-c", program])
    require_running(mark, 6)
    process.kill()
    process.wait()
    require_gone(mark)


def test_what_an_ended_command_left_behind_ends_too(mark: str) -> None:
    text = f"setsid sleep {mark} & exit 7"
    assert subprocess.run(wrap_command(["sh", "-c", text]), check=False, timeout=10).returncode == 7
    require_gone(mark)


def test_a_command_has_its_streams_and_its_exit_code() -> None:
    command = wrap_command(["sh", "-c", "cat; echo late >&2; exit 5"])
    result = subprocess.run(command, input=b"text\n", capture_output=True, check=False, timeout=10)
    assert (result.returncode, result.stdout, result.stderr) == (5, b"text\n", b"late\n")
    assert subprocess.run(wrap_command(["sh", "-c", "kill -9 $$"]), check=False).returncode == 128 + 9
    result = subprocess.run(wrap_command(["/no/program"]), capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (NOT_FOUND, b"cannot run /no/program: No such file or directory\n")


@pytest.mark.parametrize("text", ["head -c 2000000 /dev/zero", "echo short; yes ok | tr -d '\\n'"])
def test_a_line_without_an_end_ends_its_command(text: str, mark: str) -> None:
    command = wrap_command(["sh", "-c", f"{text}; sleep {mark}"], line_bytes=2**20)
    result = subprocess.run(command, capture_output=True, check=False, timeout=20)
    assert len(result.stdout) <= 2**20 + len("short\n")
    assert result.stderr == b"a line has more than 1048576 bytes: sh is ended\n"
    assert result.returncode != 0
    require_gone(mark)


def test_lines_up_to_their_limit_are_copied() -> None:
    command = wrap_command(["sh", "-c", "cat; yes | head -n 500000; exit 5"], line_bytes=2**20)
    result = subprocess.run(command, input=b"x" * 2**20 + b"\n", capture_output=True, check=False, timeout=20)
    assert (result.returncode, result.stderr) == (5, b"")
    assert result.stdout == b"x" * 2**20 + b"\n" + b"y\n" * 500_000


def test_a_command_whose_output_nobody_reads_ends() -> None:
    process = subprocess.Popen(wrap_command(["yes"], line_bytes=100), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(10) == 128 + signal.SIGPIPE


def test_a_polite_command_has_time_to_end() -> None:
    text = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    process = start(wrap_command(["sh", "-c", text]))
    process.terminate()
    assert process.communicate(timeout=10)[0] == "saved\n"


def test_processes_of_a_killed_environment_end_with_it_and_no_others(mark: str) -> None:
    stranger = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    process = start([sys.executable, "-c", ENVIRONMENT, mark])
    deadline = time.monotonic() + 30
    while len(find(mark)) < 6:  # the shell's processes come up by themselves
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    require_gone(mark)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


@pytest.mark.parametrize("is_command", [True, False], ids=["command", "environment"])
def test_processes_that_fork_and_end_again_and_again_end_too(mark: str, is_command: bool) -> None:
    program = [sys.executable, "-c", FORKING, mark]
    process = start(wrap_command(program) if is_command else [*program, "guarded"])
    process.kill()
    process.wait()
    require_gone(mark)
