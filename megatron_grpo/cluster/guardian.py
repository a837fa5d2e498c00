"""The guardian: a process that outlives the driver by a few seconds and kills the processes that the driver left.

It runs as `python -m` this module. Ray's agents notice only after a minute that the driver was killed, and a stopped
process (SIGSTOP) never notices that Ray has ended. The guardian reads a pipe, which the kernel closes however the
driver ends, and remembers the processes that the driver started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

REFRESH_S = 2.0
"""Seconds between two look-ups of the driver's processes while it lives."""

CLEANED_UP = b"."
"""Byte that the driver writes to the pipe when it has ended its processes itself."""

GRACE_S = 4.0
"""Seconds that processes have to end by themselves and release shared resources once the driver is gone."""

COMMAND_S = 30.0
"""Deadline in seconds of the command that runs after the driver was killed."""


@contextmanager
def guarded(if_killed: Sequence[str] = ()) -> Iterator[None]:
    """Kill all processes that this process started in the body if it is killed there.

    If the body ends by itself, the guardian kills only orphans: processes whose parent was started by the body and
    has ended. Children of this process are not touched then.

    Args:
        if_killed: command to run after this process was killed and its processes have ended.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid()), *if_killed]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guardian:
        assert guardian.stdin is not None
        try:
            yield
        finally:
            with suppress(BrokenPipeError):
                guardian.stdin.write(CLEANED_UP)
                guardian.stdin.close()


def main(driver: int, if_killed: Sequence[str]) -> None:
    """Watch the driver until it has cleaned up or is gone; then end its remaining processes."""
    started: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], REFRESH_S)[0]:
        started = _family(driver, started)
    cleaned_up = os.read(sys.stdin.fileno(), 1) == CLEANED_UP
    deadline = time.monotonic() + GRACE_S
    while True:
        left = _family(driver, started)
        if cleaned_up:  # the driver lives and may still need its children
            left -= _family(driver, set())
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if if_killed and not cleaned_up:
        subprocess.run(if_killed, timeout=COMMAND_S, check=False)


def _family(driver: int, known: set[psutil.Process]) -> set[psutil.Process]:
    """Known processes that still live, and all descendants of these and of the driver."""
    children = defaultdict(list)  # by pid of the parent; one scan, because every scan reads all processes
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            children[process.ppid()].append(process)
    waiting = [process for process in known if lives(process)]
    family = set(waiting)
    waiting += children[driver]
    while waiting:
        process = waiting.pop()
        family.add(process)
        waiting += [child for child in children[process.pid] if child not in family]
    return {process for process in family if process.pid not in (driver, os.getpid())}


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM (Slurm's preemption, `kill`) unwind like Ctrl-C, so that every process is ended."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("SIGTERM")

    with keep_sigterm_handler():
        signal.signal(signal.SIGTERM, interrupt)
        yield


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore this process's SIGTERM handler after the body, as `ray.init` needs, which installs its own."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def kill_stopped(processes: Iterable[psutil.Process]) -> None:
    """Kill stopped processes (SIGSTOP): they do not notice that Ray has ended, and would remain."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
