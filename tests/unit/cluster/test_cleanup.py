"""After a killed driver its processes and files are removed; after one that cleaned up, what it could not remove."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_grpo.cluster.cleanup import REFRESH_S

# The child ignores SIGTERM and has a session of its own; its child outlives it.
CHILD = "import subprocess, time; subprocess.Popen(['sleep', '300'], start_new_session=True); time.sleep(300)"
DRIVER = f"""
import subprocess, sys, time
from megatron_grpo.cluster.cleanup import cleanup_after_kill
with cleanup_after_kill():
    child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=True)
    print("up", flush=True)
    sys.stdin.readline()
print("left", flush=True)
time.sleep(300)
"""


def let_look(driver: int, *, sleeps: bool = True) -> None:
    """Wait until a driver's clean-up process has looked twice since the driver's last processes have started.

    A busy machine takes seconds to start each of them; a look is seen by what it reads in /proc.
    """
    deadline = time.monotonic() + 60

    def wait_until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def find(name: str) -> list[psutil.Process]:
        family = psutil.Process(driver).children(recursive=True)
        return [process for process in family if name in " ".join(process.cmdline()[:3])]

    def count_reads() -> int:
        return sum(process.io_counters().read_count for process in find("cluster.cleanup"))

    def has_begun() -> bool:
        return any("psutil" in Path(f"/proc/{process.pid}/maps").read_text() for process in find("cluster.cleanup"))

    wait_until(lambda: has_begun() and bool(find("sleep 300")) == sleeps)
    for _ in range(3):  # the first may have begun before
        reads = count_reads()
        wait_until(lambda before=reads: count_reads() > before)  # type: ignore[misc]
        time.sleep(REFRESH_S / 4)


ENDS = pytest.mark.parametrize(
    "killed", [pytest.param(True, id="killed"), pytest.param(False, id="cleaned up", marks=pytest.mark.slow)]
)


@ENDS
def test_processes_end_with_a_killed_driver_only(killed: bool) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdin is not None
    assert driver.stdout is not None
    assert driver.stdout.readline() == "up\n"
    let_look(driver.pid)
    family = psutil.Process(driver.pid).children(recursive=True)
    sleepers = [process for process in family if "cluster.cleanup" not in " ".join(process.cmdline())]
    assert len(sleepers) == 2
    if not killed:
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == "left\n"
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(family, timeout=20 if killed else 8)
    for process in alive:
        process.kill()
    assert set(alive) == (set() if killed else set(sleepers))


SHARING = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.ensure_running = resource_tracker.register = lambda *_: None
memory = shared_memory.SharedMemory(create=True, size=16)
sys.stdout.write(memory.name + "\\n")  # One write, so that lines of two processes stay apart.
sys.stdout.flush()
time.sleep(300)
"""
FORGETFUL_DRIVER = f"""
import subprocess, sys
from megatron_grpo.cluster.cleanup import cleanup_after_kill
with cleanup_after_kill() as remove_if_killed:
    remove_if_killed(sys.argv[1])
    subprocess.Popen([sys.executable, "-c", {SHARING!r}], start_new_session=True)
    sys.stdin.readline()
"""


@ENDS
def test_what_a_killed_driver_made_is_removed(killed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a session of Ray" / "r"
    folder.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", FORGETFUL_DRIVER, str(folder.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        segment = Path("/dev/shm") / driver.stdout.readline().strip()
        family = psutil.Process(driver.pid).children(recursive=True)
        assert segment.is_file()
        let_look(driver.pid, sleeps=False)
        if killed:
            driver.kill()
        else:
            driver.stdin.write("\n")
            driver.stdin.flush()
        driver.wait(30)
    _, alive = psutil.wait_procs(family, timeout=20 if killed else 8)
    try:
        assert (folder.exists(), segment.exists(), bool(alive)) == (not killed, not killed, not killed)
    finally:
        for process in alive:
            process.kill()
        segment.unlink(missing_ok=True)


LOSING_DRIVER = f"""
import subprocess, sys
from megatron_grpo.cluster.cleanup import cleanup_after_kill
with cleanup_after_kill():
    children = [subprocess.Popen([sys.executable, "-c", {SHARING!r}]) for _ in range(2)]
    sys.stdin.readline()
    children[0].kill()
    children[0].wait()
print("left", flush=True)
sys.stdin.readline()
"""


def test_what_a_lost_process_shared_is_freed_and_nothing_else() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOSING_DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        segments = [Path("/dev/shm") / driver.stdout.readline().strip() for _ in range(2)]
        let_look(driver.pid, sleeps=False)
        family = psutil.Process(driver.pid).children(recursive=True)
        try:
            print("go on", file=driver.stdin, flush=True)
            assert driver.stdout.readline() == "left\n"
            assert sorted(segment.exists() for segment in segments) == [False, True], "one of them still runs"
        finally:
            for process in family:
                if process.is_running():
                    process.kill()
            driver.kill()
            for segment in segments:
                segment.unlink(missing_ok=True)


ORPHANING_DRIVER = f"""
import os, signal, subprocess, sys, time
from megatron_grpo.cluster.cleanup import cleanup_after_kill
with cleanup_after_kill():
    child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=True)
    print("up", flush=True)
    sys.stdin.readline()
    child.kill()
    child.wait()
print("left", flush=True)
time.sleep(300)
"""


def test_what_outlives_the_end_of_its_parent_is_ended_even_if_it_is_stopped() -> None:
    """Ray's agent is gone and its stopped worker is still there: nobody else would end it."""
    driver = subprocess.Popen(
        [sys.executable, "-c", ORPHANING_DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    assert driver.stdout.readline() == "up\n"
    let_look(driver.pid)
    (orphan,) = [one for one in psutil.Process(driver.pid).children(recursive=True) if one.name() == "sleep"]
    orphan.suspend()
    driver.stdin.write("\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "left\n", "the driver goes on when the clean-up is done"
    try:
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    finally:
        driver.kill()
        driver.wait()
