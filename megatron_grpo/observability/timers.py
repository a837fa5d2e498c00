"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

TOTAL = "total"
"""Name of the whole step's time among its phases."""


class StepTimer:
    """Times the phases of one step, which begins when the timer is made. Phases do not nest, so they add up."""

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self._started = time.perf_counter()
        self._current: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the body's time as `name`, also when it raises; a phase entered again adds to what it has."""
        assert self._current is None, f"phase {name} inside phase {self._current}"
        self._current = name
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - start
            self._current = None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far, and of everything since the timer was made as "total"."""
        return {**self._phases, TOTAL: time.perf_counter() - self._started}
