"""How long the parts of a start-up took; they end up in summary.json."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import psutil


class StartupParts:
    """Seconds of each part of a start-up, by name. Parts go on side by side, so that their sum is not the whole."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body; one that comes again under its name is added."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def add_slowest(self, kind: str, reports: Iterable[Mapping[str, float]]) -> None:
        """Take over what processes of one kind report, of each part the slowest process.

        Args:
            kind: what the processes are, "policy" for one; a part "model" is then called "policy_model".
            reports: for each process, seconds by part.
        """
        for report in reports:
            for name, seconds in report.items():
                self.seconds[f"{kind}_{name}"] = max(seconds, self.seconds.get(f"{kind}_{name}", 0.0))


def since_command() -> float:
    """Seconds since this process was created: a run's start-up begins with its command, imports included."""
    return time.time() - psutil.Process().create_time()
