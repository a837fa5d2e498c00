"""Memory cgroups of programs, where this process may make them; elsewhere the launcher watches (`memory_watch.py`)."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PREFIX = "sandbox_"
_EMPTY_S = 10.0
"""Seconds in which all processes of a group end after they were killed."""


class MemoryCgroup:
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


def find_cgroup_parent() -> Path | None:
    """Folder of the cgroup below which this process can make memory groups; None: it may not make any.

    Empty groups that killed processes left behind are removed from it.
    """
    for folder in _candidates():
        try:
            MemoryCgroup(folder, 2**30).close()
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
