"""Memory of a program that has no memory cgroup: read from /proc, before the program can have taken much more."""

from __future__ import annotations

import os
import signal
import sys
import time

from megatron_grpo.environments.sandbox.kernel import kill, list_descendants, read, shares_memory

BEYOND = 64 << 20
"""Bytes that a program may hold beyond its limit until it is killed."""
_RATE = 4 << 30
"""Most bytes that a program takes on one processor in a second. Each page of 4 KiB needs a fault, because
`kernel.use_small_pages` and the filter leave no faster way (measured: 2.4 GiB/s, within one system call 3.4 GiB/s)."""
_SHORTEST_S = 0.001
"""Least number of seconds between two readings."""
_STOPPING_S = 5.0
"""Seconds that all processes of a program have to stop."""

_LARGE_TABLES = 6 << 20
"""Bytes of page tables above which an exact reading of a process would take a second."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_THREAD_BYTES = 32 * 1024
"""A thread's stack and description in the kernel."""
_BUFFER_BYTES = {"socket:": 2 * int(read("/proc/sys/net/core/wmem_default") or 212992), "pipe:": 65536}
"""Most bytes that a socket and a pipe of default size hold; twice a socket's size, which a last message may exceed."""


class MemoryWatch:
    """Kills the descendants of this process when their memory together exceeds a limit.

    No limit of the kernel bounds the memory of several processes together, so it has to be read, and memory that a
    program takes between two readings is noticed late. The next reading is therefore due before the processors can have
    filled the rest of the limit and half of BEYOND.

    The sum of resident sizes is quick to read but counts a shared page once for each process. When it exceeds the
    limit, all processes are stopped, so that they take nothing during the exact reading, which is slow. Until they have
    had as many page faults as would fill the rest of the limit, no further exact reading is needed. A process that was
    forked since then counts with all its pages, because it may become the only holder of pages that its parent took.
    """

    def __init__(self, limit: int, processes: int) -> None:
        """
        Args:
            limit: bytes of all processes together.
            processes: most processes and threads of the program.
        """
        self._limit = limit
        self._rate = _RATE * min(len(os.sched_getaffinity(0)), processes)
        self._due = 0.0
        """time.monotonic() of the next reading."""
        self._pages = sys.maxsize
        """Bytes of pages in the last exact reading."""
        self._faults: dict[tuple[int, bytes], int] = {}
        """Page faults before the last exact reading, of each process that it saw (its number and the time of its start,
        because numbers are used again)."""
        self.exceeded = False
        """Whether the descendants were killed for their memory."""

    def step(self) -> None:
        """Read the memory if it is time, then wait until it is time again or until SIGCHLD, which must be blocked."""
        if time.monotonic() >= self._due:
            self._look()
        signal.sigtimedwait({signal.SIGCHLD}, max(self._due - time.monotonic(), 0.0))

    def _look(self) -> None:
        begun = time.monotonic()
        held = self._quick(list_descendants(os.getpid()))
        if held > self._limit:
            held = self._stopped()
            self.exceeded |= held > self._limit
            begun = time.monotonic()
            kill(list_descendants(os.getpid()), signal.SIGKILL if self.exceeded else signal.SIGCONT)
        self._due = begun + max((self._limit + BEYOND // 2 - held) / self._rate, _SHORTEST_S)

    def _quick(self, pids: list[int]) -> int:
        """Most bytes that processes hold: resident sizes, or the last exact size and a page for each fault since."""
        total, resident, since = _buffers(pids), 0, self._pages
        for pid in pids:
            process, _, faults = _stat(pid)
            pages, kernel = _sizes(pid)
            total += kernel
            resident += pages
            since += (faults - self._faults[process]) * _PAGE if process in self._faults else pages
        return total + min(resident, since)

    def _stopped(self) -> int:
        """Stop all processes; returns their exact memory, or more than any limit if they do not stop in time.

        A reading counts if nothing ran or ended meanwhile: a page of a process that ends can count for it and again for
        those that shared it. Two readings above the limit count anyway, because a process that still fills memory
        within a system call stops only at the end of that call.

        Between vfork and the start of a program, two processes have one memory, which counts once. The older one waits
        for the younger and does not stop (state D).
        """
        above = 0
        deadline = time.monotonic() + _STOPPING_S
        while time.monotonic() < deadline:
            living = list_descendants(os.getpid())
            kill(living, signal.SIGSTOP)
            stats = {pid: _stat(pid) for pid in living}
            twins = {pid: [one for one in living if one != pid and shares_memory(pid, one)] for pid in living}
            sizes = {pid: _sizes(pid) for pid in living if pid <= min(twins[pid], default=pid)}
            self._pages = sum(
                _proportional(pid) if kernel < _LARGE_TABLES else resident for pid, (resident, kernel) in sizes.items()
            )
            self._faults = {process: faults for process, _, faults in stats.values()}
            held = _buffers(living) + sum(kernel for _, kernel in sizes.values()) + self._pages
            above = above + 1 if held > self._limit else 0
            at_rest = all(state in b"TZ" or (state == b"D" and twins[pid]) for pid, (_, state, _) in stats.items())
            if above == 2 or (at_rest and {pid: _stat(pid) for pid in list_descendants(os.getpid())} == stats):
                return held
        return sys.maxsize


def _stat(pid: int) -> tuple[tuple[int, bytes], bytes, int]:
    """Number and start of a process, its state (T: stopped, Z: ended, others run or wait) and number of page faults."""
    fields = read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
    return ((pid, fields[19]), fields[0], int(fields[7]) + int(fields[9])) if fields else ((pid, b""), b"Z", 0)


def _sizes(pid: int) -> tuple[int, int]:
    """Bytes of a process's resident pages, and of its page tables and threads."""
    found = dict.fromkeys((b"VmRSS", b"VmPTE", b"Threads"), 0)
    for line in read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(b":")
        if name in found:
            found[name] = int(value.split()[0])
    return found[b"VmRSS"] * 1024, found[b"VmPTE"] * 1024 + found[b"Threads"] * _THREAD_BYTES


def _buffers(pids: list[int]) -> int:
    """Bytes that all open sockets and pipes of processes can hold; a shared one counts once."""
    found: set[str] = set()
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:  # ended, or may not be inspected
            continue
        for name in names:
            try:
                found.add(os.readlink(f"{folder}/{name}"))
            except OSError:
                continue
    return sum(size for link in found for kind, size in _BUFFER_BYTES.items() if link.startswith(kind))


def _proportional(pid: int) -> int:
    """Bytes of a process's pages, the shared ones divided among processes; all of them without smaps_rollup."""
    for line in read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return _sizes(pid)[0]  # 0 if it has ended
