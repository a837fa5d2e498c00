"""Watches a program's memory by /proc, without a memory cgroup."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from megatron_grpo.environments.sandbox.kernel import is_memory_shared, kill, list_descendants, read

EXCESS_BYTES = 64 << 20  # that a program may hold beyond its limit until it is killed
# The most that a program takes on one processor. Each page of 4 KiB needs a fault, because `kernel.use_small_pages` and
# the filter leave no faster way (measured: 2.4 GiB/s, within one system call 3.4 GiB/s).
_BYTES_PER_S = 4 << 30
_MIN_PAUSE_S = 0.001
_STOP_TIMEOUT_S = 5.0  # deadline for all processes of a program to stop

_LARGE_TABLES = 6 << 20  # bytes of page tables above which an exact reading of a process would take a second
_PAGE = os.sysconf("SC_PAGE_SIZE")
_THREAD_BYTES = 32 * 1024  # a thread's stack and description in the kernel
# The most that a socket and a pipe of default size hold: twice a socket's size, which its last message may exceed.
_BUFFER_BYTES = {"socket:": 2 * int(read("/proc/sys/net/core/wmem_default") or 212992), "pipe:": 65536}


class MemoryWatch:
    """Kills this process's descendants when their memory exceeds a limit."""

    # No limit of the kernel bounds the memory of several processes together, so it has to be read, and memory that a
    # program takes between two readings is noticed late. The next reading is therefore due before the processors can
    # have filled the rest of the limit and half of EXCESS_BYTES.
    #
    # The sum of resident sizes is quick to read but counts a shared page once for each process. When it exceeds the
    # limit, all processes are stopped, so that they take nothing during the exact reading, which is slow. Until they
    # have had as many page faults as would fill the rest of the limit, no further exact reading is needed. A process
    # that was forked since then counts with all its pages, because it may become the only holder of pages that its
    # parent took.

    def __init__(self, limit: int, processes: int) -> None:
        self._limit = limit
        self._bytes_per_s = _BYTES_PER_S * min(len(os.sched_getaffinity(0)), processes)
        self._due = 0.0  # time.monotonic() of the next reading
        self._exact_bytes = sys.maxsize  # pages in the last exact reading
        # Page faults of each process before the last exact reading; by pid and time of start, because pids are reused.
        self._faults: dict[tuple[int, bytes], int] = {}
        self.has_exceeded_limit = False  # True once the descendants were killed for their memory

    def step(self) -> None:
        """Read the memory if due, then wait for the next reading.

        The caller has blocked SIGCHLD.
        """
        start = time.monotonic()
        if start >= self._due:
            memory = self._estimate(list_descendants(os.getpid()))
            if memory > self._limit:
                memory = self._stop_and_measure()
                self.has_exceeded_limit |= memory > self._limit
                start = time.monotonic()  # the processes took nothing while they were stopped
                kill(list_descendants(os.getpid()), signal.SIGKILL if self.has_exceeded_limit else signal.SIGCONT)
            self._due = start + max((self._limit + EXCESS_BYTES // 2 - memory) / self._bytes_per_s, _MIN_PAUSE_S)
        signal.sigtimedwait({signal.SIGCHLD}, max(self._due - time.monotonic(), 0.0))

    def _estimate(self, pids: list[int]) -> int:
        """Estimate the bytes of processes quickly, never too low."""
        # The smaller of the resident sizes and the last exact size with a page for each fault since then.
        total, resident, exact_and_faults = _count_buffer_bytes(pids), 0, self._exact_bytes
        for pid in pids:
            process, _, faults = _read_stat(pid)
            pages, kernel = _read_sizes(pid)
            total += kernel
            resident += pages
            exact_and_faults += (faults - self._faults[process]) * _PAGE if process in self._faults else pages
        return total + min(resident, exact_and_faults)

    def _stop_and_measure(self) -> int:
        """Stop all processes; returns their exact bytes, or sys.maxsize."""
        # A reading counts if nothing ran or ended meanwhile: a page of a process that ends can count for it and again
        # for the processes that shared it. Two readings above the limit count anyway, because a process that still
        # fills memory within a system call stops only at the end of that call.
        #
        # Between vfork and the start of a program, two processes share one memory, which counts once. The older process
        # waits for the younger and does not stop (state D).
        readings_above = 0
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            living = list_descendants(os.getpid())
            kill(living, signal.SIGSTOP)
            stats = {pid: _read_stat(pid) for pid in living}
            twins = {pid: [twin for twin in living if twin != pid and is_memory_shared(pid, twin)] for pid in living}
            sizes = {pid: _read_sizes(pid) for pid in living if pid <= min(twins[pid], default=pid)}
            self._exact_bytes = sum(
                _read_proportional_size(pid) if kernel < _LARGE_TABLES else resident
                for pid, (resident, kernel) in sizes.items()
            )
            self._faults = {process: faults for process, _, faults in stats.values()}
            memory = _count_buffer_bytes(living) + sum(kernel for _, kernel in sizes.values()) + self._exact_bytes
            readings_above = readings_above + 1 if memory > self._limit else 0
            at_rest = all(state in b"TZ" or (state == b"D" and twins[pid]) for pid, (_, state, _) in stats.items())
            if readings_above == 2 or (
                at_rest and {pid: _read_stat(pid) for pid in list_descendants(os.getpid())} == stats
            ):
                return memory
        return sys.maxsize


def _read_stat(pid: int) -> tuple[tuple[int, bytes], bytes, int]:
    """Read a process's identity, state and page faults.

    State T: stopped, Z: ended; in others it runs or waits.
    """
    fields = read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
    return ((pid, fields[19]), fields[0], int(fields[7]) + int(fields[9])) if fields else ((pid, b""), b"Z", 0)


def _read_sizes(pid: int) -> tuple[int, int]:
    """Read the bytes of pages, and of page tables and threads."""
    numbers = dict.fromkeys((b"VmRSS", b"VmPTE", b"Threads"), 0)
    for line in read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(b":")
        if name in numbers:
            numbers[name] = int(value.split()[0])
    return numbers[b"VmRSS"] * 1024, numbers[b"VmPTE"] * 1024 + numbers[b"Threads"] * _THREAD_BYTES


def _count_buffer_bytes(pids: list[int]) -> int:
    """Count the bytes that all open sockets and pipes can hold."""
    links: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # the process has ended, or may not be inspected
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # the descriptor was closed
                    links.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sum(size for link in links for kind, size in _BUFFER_BYTES.items() if link.startswith(kind))


def _read_proportional_size(pid: int) -> int:
    """Read the bytes of pages, with shared pages divided."""
    for line in read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return _read_sizes(pid)[0]  # the kernel has no smaps_rollup, or the process has ended: 0
