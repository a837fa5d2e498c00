"""Shared memory of vLLM's message queues, which nobody frees when the processes that share it are killed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

QUEUE_SEGMENTS = "/dev/shm/psm_"
"""How Python names the segments that vLLM's queues live in; the rest of the name is random."""


def queue_segments(process: psutil.Process) -> set[Path]:
    """Files of the queue segments that a process has mapped; empty when the process is gone."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {Path(line.split()[-1]) for line in maps.splitlines() if QUEUE_SEGMENTS in line and "(deleted)" not in line}


def free(segments: Iterable[Path]) -> None:
    """Remove the files; the memory goes with the last process that has it mapped."""
    for segment in segments:
        segment.unlink(missing_ok=True)
