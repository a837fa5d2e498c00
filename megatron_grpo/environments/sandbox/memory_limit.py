"""Memory cgroups of programs; where they are not allowed, `memory_watch.py` watches."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron_grpo.environments.sandbox.kernel import kill

_PREFIX = "sandbox_"
_EMPTY_S = 10.0  # in which all killed processes of a cgroup end


class MemoryCgroup:
    """Memory cgroup of a program; the kernel kills processes above the limit."""

    def __init__(self, parent: Path, limit: int) -> None:
        """Make a cgroup of `limit` bytes below `parent`; OSError if not allowed."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_", dir=parent))
        version_2 = Path(self._folder, "memory.max").exists()
        names = ("max", "swap.max") if version_2 else ("limit_in_bytes", "memsw.limit_in_bytes")
        limit_file, swap_file = (Path(self._folder, f"memory.{name}") for name in names)
        self._events = Path(self._folder, "memory.events" if version_2 else "memory.oom_control")
        try:
            limit_file.write_text(str(limit))
            if swap_file.exists():  # kernels without accounting of swap lack it
                swap_file.write_text("0" if version_2 else str(limit))
            # A process that writes 0 to this file descriptor joins the cgroup.
            self.join_fd = os.open(self._folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            self._folder.rmdir()
            raise

    def has_exceeded_limit(self) -> bool:
        lines = self._events.read_text().splitlines()
        return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in lines)

    def close(self) -> None:
        # Processes that left the program's tree are still in its cgroup.
        os.close(self.join_fd)
        deadline = time.monotonic() + _EMPTY_S
        while True:
            kill(map(int, Path(self._folder, "cgroup.procs").read_text().split()), signal.SIGKILL)
            try:
                return self._folder.rmdir()
            except OSError:  # killed processes may still be ending
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)


def find_cgroup_parent() -> Path | None:
    """Find a cgroup below which this process may make others, or None."""
    for folder in _list_candidates():
        try:
            MemoryCgroup(folder, 2**30).close()
        except OSError:
            continue
        for cgroup in folder.glob(f"{_PREFIX}*"):  # remove empty ones that killed processes left behind
            if not Path("/proc", cgroup.name.split("_")[1]).exists():
                with suppress(OSError):  # not empty
                    cgroup.rmdir()
        return folder
    return None


def _list_candidates() -> Iterator[Path]:
    """Yield this process's memory cgroup and, in version 2, its parent."""
    # A cgroup of version 2 that holds processes gives no memory controller to cgroups below it, but its parent does.
    cgroups: dict[str, str] = {}  # by controller, "" in version 2
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        cgroups |= dict.fromkeys(controllers.split(","), path)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, system = line.partition(" - ")
        root, mount_point = mount.split()[3:5]
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in cgroups:
            yield Path(os.path.normpath(f"{mount_point}/{os.path.relpath(cgroups['memory'], root)}"))
        elif kind == "cgroup2" and "" in cgroups:
            folder = Path(os.path.normpath(f"{mount_point}/{os.path.relpath(cgroups[''], root)}"))
            yield from (folder, folder.parent) if folder != Path(mount_point) else (folder,)
