"""Spans: when a process was in which phase, appended to a file for each process.

The page of a run draws lanes of all processes from these files, and a trace is made of them. A line is a JSON list:
[begin in seconds since the epoch, seconds, phase] and on a GPU the GiB of it that torch held at the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.config.outside_files import open_to_append

SPANS_FOLDER = "spans"  # folder of the files, inside the folder of the logs
FILE_BYTES = 2 * 2**20  # of a process's file; it is then renamed, and the one renamed before is deleted
OLDER = ".older"  # end of the name of a renamed file
GAP_S = 0.02  # calls of one phase that are no further apart are one span: no more than 50 spans a second
_MAX_WAITING = 2000  # spans in memory while the file cannot be written


@dataclass(frozen=True, slots=True)
class Span:
    """A time that a process spent in a phase.

    Example: Span("policy rank 0", "train", begin=1764439200.1, seconds=0.25, gpu_gib=None)
    """

    process: str
    phase: str
    begin: float  # seconds since the epoch, on the clock of the process's machine
    seconds: float
    gpu_gib: float | None = None  # memory of the GPU that torch held at the end; None: no GPU

    @property
    def end(self) -> float:
        """Seconds since the epoch."""
        return self.begin + self.seconds


class SpanRecorder:
    """Joins the calls of each phase to spans, and writes them."""

    def __init__(self, folder: Path, stem: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{stem}.jsonl"
        self._lock = threading.Lock()
        self._calls: dict[str, int] = {}  # concurrent calls of each phase
        self._begins: dict[str, float] = {}
        self._ended: dict[str, tuple[float, float, float | None]] = {}  # begin, end and memory of the last span
        self._lines: list[str] = []

    def enter(self, phase: str, now: float) -> None:
        """Note that a call of a phase begins."""
        with self._lock:
            self._calls[phase] = self._calls.get(phase, 0) + 1
            if self._calls[phase] > 1:
                return
            begin, end, _ = self._ended.get(phase, (now, -GAP_S, None))
            if now - end > GAP_S:
                self._keep(phase)
                begin = now
            self._ended.pop(phase, None)
            self._begins[phase] = begin

    def leave(self, phase: str, now: float) -> None:
        """Note that a call of a phase ends."""
        with self._lock:
            self._calls[phase] = self._calls.get(phase, 1) - 1
            if self._calls[phase] == 0:
                self._ended[phase] = (self._begins.pop(phase, now), now, read_gpu_gib())

    def write(self, *, ended: bool = False) -> None:
        """Append the spans that no call continues.

        `ended`: the process ends, so all of them.
        """
        now = time.time()
        with self._lock:
            for phase in [phase for phase, (_, end, _) in self._ended.items() if ended or now - end > GAP_S]:
                self._keep(phase)
            lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            with open_to_append(self._path) as file:
                file.write("".join(lines))
                size = os.fstat(file.fileno()).st_size
            if size > FILE_BYTES:
                self._path.replace(self._path.with_name(self._path.name + OLDER))
        except OSError:  # a full disk, which the heartbeat reports
            with self._lock:
                self._lines = (lines + self._lines)[-_MAX_WAITING:]

    def _keep(self, phase: str) -> None:
        if (span := self._ended.pop(phase, None)) is not None:
            begin, end, memory = span
            values = [round(begin, 4), round(end - begin, 4), phase, *([] if memory is None else [round(memory, 2)])]
            self._lines.append(json.dumps(values) + "\n")


def read_gpu_gib() -> float | None:
    """Read the GiB that torch holds of the GPU; None: no GPU."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # torch is not imported for this
    if cuda is None or not getattr(cuda, "is_initialized", bool)():
        return None
    return float(cuda.memory_reserved()) / 2**30
