"""Programs that hold memory of one kind each, and the most memory that a function and all its processes ever held."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_grpo.environments.sandbox.sandbox import MemoryCgroup, find_cgroup_parent
from tests.support.forked import in_fork
from tests.support.programs import read_programs

_WHATEVER = 2**36


def peak_of(function: Callable[[], Any]) -> tuple[Any, int | None]:
    """What a function returns in a forked process, and the most bytes that its cgroup held; None without cgroups."""
    parent = find_cgroup_parent()
    if parent is None:
        return function(), None
    group = MemoryCgroup(parent, _WHATEVER)
    try:
        result = in_fork(function, lambda: _join(group))
        folder = Path(os.readlink(f"/proc/self/fd/{group.join_fd}")).parent
        files = [path for path in (folder / "memory.peak", folder / "memory.max_usage_in_bytes") if path.exists()]
        return result, int(files[0].read_text())
    finally:
        group.close()


def _join(group: MemoryCgroup) -> None:
    os.write(group.join_fd, b"0")


_TEMPLATES = read_programs("held_memory_templates")
_MAPPED, _FILE, _SOCKETS = (_TEMPLATES[name] for name in ("mapped", "file", "sockets"))
_HIDE = "held.madvise(mmap.MADV_DONTNEED)"
_ANONYMOUS = "held = mmap.mmap(-1, 1 << 30)"
_ZERO = "held = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 30)"
HOLDING = read_programs("held_memory") | {
    "shared": _MAPPED.format(opened=_ANONYMOUS, hide=""),
    "shared, unmapped": _MAPPED.format(opened=_ANONYMOUS, hide=_HIDE),
    "zero": _MAPPED.format(opened=_ZERO, hide=""),
    "zero, unmapped": _MAPPED.format(opened=_ZERO, hide=_HIDE),
    "folder": _FILE.format(folder="."),
    "/dev/shm": _FILE.format(folder="/dev/shm"),
    "sockets": _SOCKETS.format(passed=False, processes=1),
    "sockets of many": _SOCKETS.format(passed=False, processes=7),
    "sockets in messages": _SOCKETS.format(passed=True, processes=7),
}
"""Programs that hold more than 200 MiB if they can, by the kind of memory."""
