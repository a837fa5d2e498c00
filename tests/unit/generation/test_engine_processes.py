"""An engine is ended with everything that it started, and nothing else is."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from megatron_grpo.cluster.cleanup import find_shared_files
from megatron_grpo.generation.engine_processes import EngineProcesses, end_processes

FAMILY = """
import subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.ensure_running = resource_tracker.register = lambda *_: None
memory = shared_memory.SharedMemory(create=True, size=16)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(memory.name, flush=True)
time.sleep(300)
"""


@contextmanager
def family() -> Iterator[tuple[list[psutil.Process], Path]]:
    """A process with a child, and the file of the memory that it shares."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        segment = Path("/dev/shm") / parent.stdout.readline().strip()
        process = psutil.Process(parent.pid)
        members = [process, *process.children(recursive=True)]
        try:
            yield members, segment
        finally:
            for one in members:
                if one.is_running():
                    one.kill()
            segment.unlink(missing_ok=True)


def known(processes: list[psutil.Process], later_s: float = 0.0) -> EngineProcesses:
    return EngineProcesses("here", tuple((one.pid, one.create_time() + later_s) for one in processes))


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_children_and_stopped_processes_end_and_what_they_shared_is_freed() -> None:
    with family() as (members, segment):
        assert len(members) == 2
        assert segment.exists()
        members[1].send_signal(signal.SIGSTOP)
        assert end_processes(known(members[:1])) == [], "the child is found although nobody named it"
        assert all(map(gone, members))
        assert not segment.exists()


def test_what_outlived_its_parent_ends_too() -> None:
    with family() as (members, _):
        engine = known(members)
        members[0].kill()
        deadline = time.monotonic() + 10
        while not gone(members[0]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not gone(members[1])
        assert end_processes(engine) == []
        assert gone(members[1])


def test_a_younger_process_with_a_number_that_was_used_before_is_left_alone() -> None:
    with family() as (members, segment):
        assert end_processes(known(members, later_s=-100.0)) == []
        assert not any(map(gone, members))
        assert segment.exists()


def test_all_kinds_of_shared_memory_that_vllm_leaves_are_found() -> None:
    stem = f"/dev/shm/{os.getpid()}"
    files = [Path(f"{stem}-[0-1]-cpushm_0"), Path(f"/dev/shm/sem.mp-{os.getpid()}"), Path(f"{stem}-other")]
    with ExitStack() as stack:
        for file in files:
            stack.callback(file.unlink, missing_ok=True)
            file.write_bytes(bytes(mmap.PAGESIZE))
            stack.enter_context(mmap.mmap(stack.enter_context(file.open("r+b")).fileno(), 0))
        own = psutil.Process()
        assert find_shared_files(own) & {*files} == {files[0]}
        assert find_shared_files(own, with_semaphores=True) & {*files} == {*files[:2]}
