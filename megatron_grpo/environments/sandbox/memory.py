"""Memory of a program: counted by a cgroup where this process may make one, and otherwise estimated from /proc."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron_grpo.environments.sandbox.kernel import read

_PREFIX = "sandbox_"
_EMPTY_S = 10.0
"""Seconds in which all processes of a group end after they were killed."""

_THREAD_BYTES = 32 * 1024
"""A thread's stack and description in the kernel."""
_BUFFER_BYTES = {"socket:": 2 * int(read("/proc/sys/net/core/wmem_default") or 212992), "pipe:": 65536}
"""Most bytes that a socket and a pipe of default size hold; twice a socket's size, which a last message may exceed."""


class MemoryGroup:
    """Memory cgroup of one program; the kernel kills the program's processes when their memory exceeds the limit."""

    def __init__(self, parent: Path, limit: int) -> None:
        """
        Args:
            parent: folder of the cgroup below which the group is made.
            limit: bytes of memory without swap.

        Raises:
            OSError: this process may not make the group or limit its memory.
        """
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_", dir=parent))
        version_2 = Path(self._folder, "memory.max").exists()
        names = ("max", "swap.max") if version_2 else ("limit_in_bytes", "memsw.limit_in_bytes")
        limiting, swap = (Path(self._folder, f"memory.{name}") for name in names)
        self._events = Path(self._folder, "memory.events" if version_2 else "memory.oom_control")
        try:
            limiting.write_text(str(limit))
            if swap.exists():  # kernels without accounting of swap lack it
                swap.write_text("0" if version_2 else str(limit))
            self.joining = os.open(self._folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self._folder.rmdir()
            raise

    joining: int
    """File descriptor through which a process joins the group, by writing 0."""

    def exceeded(self) -> bool:
        """Whether the kernel has killed a process of the group for its memory."""
        lines = self._events.read_text().splitlines()
        return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in lines)

    def close(self) -> None:
        """Kill all processes of the group, also those that left the program's tree, and remove the group."""
        os.close(self.joining)
        deadline = time.monotonic() + _EMPTY_S
        while True:
            for pid in Path(self._folder, "cgroup.procs").read_text().split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            try:
                self._folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
            else:
                return


def parent_of_groups() -> Path | None:
    """Folder of the cgroup below which this process can make memory groups; None: it may not make any.

    Empty groups that killed processes left behind are removed from it.
    """
    for folder in _candidates():
        try:
            MemoryGroup(folder, 2**30).close()
        except OSError:
            continue
        for group in folder.glob(f"{_PREFIX}*"):
            if not Path("/proc", group.name.split("_")[1]).exists():
                with suppress(OSError):  # not empty
                    group.rmdir()
        return folder
    return None


def _candidates() -> Iterator[Path]:
    """Folders of this process's memory cgroup and, in version 2 of cgroups, of its parent.

    A group of version 2 that holds processes gives no memory controller to groups below it, but its parent does.
    """
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, system = line.partition(" - ")
        root, place = mount.split()[3:5]
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in own:
            yield Path(os.path.normpath(f"{place}/{os.path.relpath(own['memory'], root)}"))
        elif kind == "cgroup2" and "" in own:
            here = Path(os.path.normpath(f"{place}/{os.path.relpath(own[''], root)}"))
            yield from (here, here.parent) if here != Path(place) else (here,)


def memory(pids: list[int], limit: int) -> int:
    """Total memory of processes, of their page tables and threads, and of their sockets and pipes, in bytes.

    Up to the limit it is the sum of resident sizes, which are quick to read but count shared pages several times. A sum
    above the limit is recomputed from proportional sizes, which divide shared pages among their processes. A process
    with large page tables keeps its resident size: reading the proportional one would take a second.
    """
    sizes = {pid: _sizes(pid) for pid in pids}
    kernel = _buffers(pids) + sum(held for _, held in sizes.values())
    total = kernel + sum(resident for resident, _ in sizes.values())
    if total <= limit:
        return total
    quick = {pid: held < limit // 32 for pid, (_, held) in sizes.items()}

    def proportional() -> int:
        return sum(_proportional(pid) if quick[pid] else resident for pid, (resident, _) in sizes.items())

    # Pages of a process that ends during a reading count for it and again for those that shared them: take the lower.
    return kernel + min(proportional(), proportional())


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
