"""Clean-up after a killed driver, by a process that outlives it.

The process runs as `python -m` this module. Ray's agents notice only after a minute that the driver was killed, and a
stopped process (SIGSTOP) never notices that Ray has ended. The clean-up process reads a pipe, which the kernel closes
however the driver ends, and remembers the processes that the driver started; it ends them and removes their files.
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

REFRESH_S = 2.0  # seconds between two look-ups of the driver's processes while it lives
GRACE_S = 4.0  # seconds in which processes may end by themselves and release shared resources
COMMAND_S = 30.0  # deadline of the command that runs after the driver was killed

# Line that the driver writes to the pipe once it has ended its processes; any other line is the path of a folder.
CLEANED_UP = b"\0"

# Shared memory that vLLM does not remove: of its queues, named by Python, and of its CPU collectives.
_SEGMENTS = re.compile("/dev/shm/(psm_|.*-cpushm)")
_SEMAPHORES = "/dev/shm/sem.mp-"  # beginning of the names of semaphores that remain when a process ends by a signal


def find_shared_files(process: psutil.Process, *, with_semaphores: bool = False) -> set[Path]:
    """Find the files of shared memory that a process has mapped.

    `with_semaphores`: also those that remain only if the process is killed.
    """
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    files = {line.split()[-1] for line in maps.splitlines() if "/dev/shm/" in line and "(deleted)" not in line}
    return {Path(file) for file in files if _SEGMENTS.match(file) or (with_semaphores and file.startswith(_SEMAPHORES))}


def remove_segments(segments: Iterable[Path]) -> None:
    """Remove files of shared memory, which is freed when its last user ends."""
    for segment in segments:
        segment.unlink(missing_ok=True)


FolderRemover = Callable[[str], None]  # names a folder to remove if the driver is killed


@contextmanager
def cleanup_after_kill(if_killed: Sequence[str] = ()) -> Iterator[FolderRemover]:
    """End all processes of the body if this process is killed.

    If the body ends by itself, only orphans are killed: processes whose parent was started by the body and has ended.
    `if_killed`: command to run after this process was killed and its processes have ended.
    """
    command = [sys.executable, "-m", __name__, str(os.getpid()), *if_killed]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as cleaner:
        pipe = cleaner.stdin
        assert pipe is not None

        def write_line(line: bytes) -> None:
            with suppress(BrokenPipeError):
                pipe.write(line + b"\n")
                pipe.flush()

        try:
            yield lambda folder: write_line(os.fsencode(folder))
        finally:
            write_line(CLEANED_UP)
            with suppress(BrokenPipeError):
                pipe.close()


def main(driver: int, if_killed: Sequence[str]) -> None:
    """Watch the driver until it is gone, and clean up after it."""
    started: set[psutil.Process] = set()  # processes of the driver that were seen
    shared: set[Path] = set()  # files that these and earlier processes were seen to use
    previous_files: set[Path] = set()
    current_files: set[Path] = set()
    received = b""
    while not received.endswith(CLEANED_UP + b"\n"):
        if not select.select([sys.stdin], [], [], REFRESH_S)[0]:
            started = _find_descendants(driver, started)
            # A file is looked at twice, because it is mapped a moment after it was made.
            previous_files, current_files = current_files, set(Path("/dev/shm").iterdir())
            if not current_files <= previous_files:
                shared |= (current_files - previous_files).intersection(_find_mapped_files(started))
        elif piece := os.read(sys.stdin.fileno(), 2**16):
            received += piece
        else:
            break
    lines = received.split(b"\n")[:-1]
    has_cleaned_up = CLEANED_UP in lines
    _end_processes(driver, started, shared, driver_lives=has_cleaned_up)
    if not has_cleaned_up:
        for folder in lines:
            shutil.rmtree(folder, ignore_errors=True)
        if if_killed:
            subprocess.run(if_killed, timeout=COMMAND_S, check=False)


def _find_mapped_files(processes: Iterable[psutil.Process]) -> set[Path]:
    return set().union(*(find_shared_files(process, with_semaphores=True) for process in processes))


def _end_processes(driver: int, started: set[psutil.Process], shared: set[Path], *, driver_lives: bool) -> None:
    """Kill the driver's processes that do not end; remove their shared memory."""
    # `driver_lives`: spare the driver's children and their shared memory.
    deadline = time.monotonic() + GRACE_S
    while True:
        living = _find_descendants(driver, started)
        spared = _find_descendants(driver, set()) if driver_lives else set()
        living -= spared
        shared = shared | _find_mapped_files(living)
        if not living or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for process in living:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if driver_lives and psutil.pid_exists(driver):
        spared.add(psutil.Process(driver))
    remove_segments(shared - _find_mapped_files(spared))


def _find_descendants(driver: int, started: set[psutil.Process]) -> set[psutil.Process]:
    """Find the living processes of `started` and the driver, with all descendants."""
    children = defaultdict(list)  # by pid of the parent; one scan, because every scan reads all processes
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            children[process.ppid()].append(process)
    waiting = [process for process in started if is_alive(process)]
    descendants = set(waiting)
    waiting += children[driver]
    while waiting:
        process = waiting.pop()
        descendants.add(process)
        waiting += [child for child in children[process.pid] if child not in descendants]
    return {process for process in descendants if process.pid not in (driver, os.getpid())}


def is_alive(process: psutil.Process) -> bool:
    """True if a process still runs; a zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Let SIGTERM (Slurm's preemption, `kill`) unwind like Ctrl-C."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("SIGTERM")

    with keep_sigterm_handler():
        signal.signal(signal.SIGTERM, interrupt)
        yield


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler after the body: `ray.init` installs its own."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def kill_stopped(processes: Iterable[psutil.Process]) -> None:
    """Kill stopped processes (SIGSTOP), which would outlive Ray."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
