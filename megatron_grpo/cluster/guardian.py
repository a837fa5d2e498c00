"""The guardian: a process that outlives the driver by a few seconds and ends the processes that the driver could not.

It runs as `python -m` this module. Ray's agents notice only after a minute that the driver was killed, and a stopped
process (SIGSTOP) never notices Ray's end. The guardian holds the other end of a pipe, which the kernel closes however
the driver ends, and remembers which processes the driver had started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

REFRESH_S = 2.0
"""How often the driver's processes are looked up while it lives."""

CLEANED_UP = b"."
"""What the driver writes to the pipe when it has ended its processes itself."""

GRACE_S = 4.0
"""Time that processes have to end by themselves and free what they share, once the driver is gone."""

COMMAND_S = 30.0
"""Deadline of the command that is run after a driver that was killed."""


@contextmanager
def guarded(if_killed: Sequence[str] = ()) -> Iterator[None]:
    """End all processes that this process starts in the body, if it is killed there.

    If the body ends by itself, it has ended its own children, and the guardian ends only orphans: processes whose
    parent was started by the body and has ended. Children of this process are never touched then.

    Args:
        if_killed: a command that is run once this process was killed and its processes are ended.
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
        if cleaned_up:  # the driver lives, and its children are its own affair
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
    """The known processes that still live, with all their children, and all children of the driver."""
    children = defaultdict(list)  # by pid of the parent; looked up once, as each look is at all processes
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

    previous: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore this process's SIGTERM handler after the body: `ray.init` replaces it by one that ends Ray first."""
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
