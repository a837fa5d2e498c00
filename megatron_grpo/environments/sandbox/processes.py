"""Descendants of a process and their memory, read from /proc."""

from __future__ import annotations

import os

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

    Up to the limit it is the sum of resident sizes, which are quick to read and count shared pages several times. A sum
    above the limit is computed again from proportional sizes, which divide shared pages among their processes.
    """
    resident = sum(_resident(pid) for pid in pids)
    return resident if resident <= limit else sum(_proportional(pid) for pid in pids)


def _children(pid: int) -> list[int]:
    """Children of all threads of a process."""
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for thread in threads:
        children += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return children


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)


def _read(path: str) -> bytes:
    """A file of /proc; empty when its process has ended or may not be inspected."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
