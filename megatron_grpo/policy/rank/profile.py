"""Profiles of a rank: where the time of a step goes, operator by operator, and on a GPU who holds its memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MEMORY_EVENTS = 200_000
"""Allocations that a memory snapshot remembers, the latest ones."""


@dataclass(slots=True)
class _Running:
    """The profile that this process is recording."""

    profiler: profile | None = None


_running = _Running()


def begin_profile(_: Any) -> None:
    """Record from here on; runs on every rank."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    _running.profiler = profile(activities=activities, profile_memory=True, record_shapes=True)
    _running.profiler.start()


def end_profile(_: Any, folder: str, name: str) -> None:
    """Stop, and write NAME.json (a trace for chrome://tracing or Perfetto) and on a GPU NAME.memory.pickle.

    Args:
        folder: where; exists.
        name: of this rank's files.
    """
    assert _running.profiler is not None, "a profile ends that did not begin"
    _running.profiler.stop()
    _running.profiler.export_chrome_trace(str(Path(folder) / f"{name}.json"))
    _running.profiler = None
    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(Path(folder) / f"{name}.memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
