"""The processes below one, and their memory, read from /proc. Standard library only: it runs in bare Python too."""

from __future__ import annotations

import os
from contextlib import suppress

_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """All living processes below a process, nearest first; zombies count until they are reaped."""
    found: list[int] = []
    below = _children(pid)
    while below:
        found += below
        below = [grandchild for child in below for grandchild in _children(child)]
    return found


def memory(pids: list[int], limit: int) -> int:
    """Bytes of memory of some processes together.

    Up to the limit it is the sum of what each has resident, which is quickly read and counts shared pages several
    times; a sum beyond the limit is taken again with shared pages divided among their users.
    """
    resident = sum(_resident(pid) for pid in pids)
    return resident if resident <= limit else sum(_proportional(pid) for pid in pids)


def _children(pid: int) -> list[int]:
    """Children of all threads of a process."""
    children: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def _resident(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)
