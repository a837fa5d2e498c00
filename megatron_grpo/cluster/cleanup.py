"""The guardian: a process that outlives the driver by a few seconds and removes the processes and files that it left.

It runs as `python -m` this module. Ray's agents notice only after a minute that the driver was killed, and a stopped
process (SIGSTOP) never notices that Ray has ended. The guardian reads a pipe, which the kernel closes however the
driver ends, and remembers the processes that the driver started.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

REFRESH_S = 2.0
"""Seconds between two look-ups of the driver's processes while it lives."""

CLEANED_UP = b"\0"
"""Line that the driver writes to the pipe when it has ended its processes itself; other lines are paths of folders."""

GRACE_S = 4.0
"""Seconds that processes have to end by themselves and release shared resources once the driver is gone."""

COMMAND_S = 30.0
"""Deadline in seconds of the command that runs after the driver was killed."""


_SEGMENTS = re.compile("/dev/shm/(psm_|.*-cpushm)")
"""Names of shared memory that vLLM does not remove: of its queues, named by Python, and of its CPU collectives."""
_SEMAPHORES = "/dev/shm/sem.mp-"
"""Beginning of the names of semaphores that the end of a process by a signal leaves behind."""


def find_shared_files(process: psutil.Process, *, killed: bool = False) -> set[Path]:
    """Files of the shared memory that a process has mapped; empty if the process is gone.

    With `killed` semaphores too, which a process that ends by itself removes.
    """
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    files = {line.split()[-1] for line in maps.splitlines() if "/dev/shm/" in line and "(deleted)" not in line}
    return {Path(file) for file in files if _SEGMENTS.match(file) or (killed and file.startswith(_SEMAPHORES))}


def remove_segments(segments: Iterable[Path]) -> None:
    """Remove the segments' files; memory is freed when the last process that has mapped it ends."""
    for segment in segments:
        segment.unlink(missing_ok=True)


FolderRemover = Callable[[str], None]
"""Tells the guardian of a folder that it removes if the driver is killed."""


@contextmanager
def cleanup_after_kill(if_killed: Sequence[str] = ()) -> Iterator[FolderRemover]:
    """Kill all processes that this process started in the body if it is killed there.

    If the body ends by itself, the guardian kills only orphans: processes whose parent was started by the body and
    has ended. Children of this process are not touched then.

    Args:
        if_killed: command to run after this process was killed and its processes have ended.

    Yields:
        A function that names a folder to remove if this process is killed.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid()), *if_killed]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guardian:
        pipe = guardian.stdin
        assert pipe is not None

        def tell(line: bytes) -> None:
            with suppress(BrokenPipeError):
                pipe.write(line + b"\n")
                pipe.flush()

        try:
            yield lambda folder: tell(os.fsencode(folder))
        finally:
            tell(CLEANED_UP)
            with suppress(BrokenPipeError):
                pipe.close()


def main(driver: int, if_killed: Sequence[str]) -> None:
    """Watch the driver until it has cleaned up or is gone; then end its remaining processes and remove its files."""
    started: set[psutil.Process] = set()
    shared: set[Path] = set()
    known: set[Path] = set()
    newest: set[Path] = set()
    told = b""
    while not told.endswith(CLEANED_UP + b"\n"):
        if not select.select([sys.stdin], [], [], REFRESH_S)[0]:
            started = _family(driver, started)
            # A file is looked at twice, because it is mapped a moment after it was made.
            known, newest = newest, set(Path("/dev/shm").iterdir())
            if not newest <= known:
                shared |= (newest - known).intersection(_mapped(started))
        elif piece := os.read(sys.stdin.fileno(), 2**16):
            told += piece
        else:
            break
    lines = told.split(b"\n")[:-1]
    cleaned_up = CLEANED_UP in lines
    _end(driver, started, shared, spare=cleaned_up)
    if not cleaned_up:
        for folder in lines:
            shutil.rmtree(folder, ignore_errors=True)
        if if_killed:
            subprocess.run(if_killed, timeout=COMMAND_S, check=False)


def _mapped(processes: Iterable[psutil.Process]) -> set[Path]:
    return set().union(*(find_shared_files(process, killed=True) for process in processes))


def _end(driver: int, started: set[psutil.Process], shared: set[Path], *, spare: bool) -> None:
    """Kill the processes of the driver that do not end by themselves, and free the shared memory of all.

    Args:
        driver: pid of the driver.
        started: processes of the driver that the guardian has seen.
        shared: files of shared memory that these and earlier processes were seen to use.
        spare: whether the driver lives; its children and their shared memory are then left alone.
    """
    deadline = time.monotonic() + GRACE_S
    while True:
        left = _family(driver, started)
        spared = _family(driver, set()) if spare else set()
        left -= spared
        shared = shared | _mapped(left)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if spare and psutil.pid_exists(driver):
        spared.add(psutil.Process(driver))
    remove_segments(shared - _mapped(spared))


def _family(driver: int, known: set[psutil.Process]) -> set[psutil.Process]:
    """Known processes that still live, and all descendants of these and of the driver."""
    children = defaultdict(list)  # by pid of the parent; one scan, because every scan reads all processes
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            children[process.ppid()].append(process)
    waiting = [process for process in known if is_alive(process)]
    family = set(waiting)
    waiting += children[driver]
    while waiting:
        process = waiting.pop()
        family.add(process)
        waiting += [child for child in children[process.pid] if child not in family]
    return {process for process in family if process.pid not in (driver, os.getpid())}


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
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
