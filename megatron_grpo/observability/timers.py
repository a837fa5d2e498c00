"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Seconds by phase of one step. Phases may follow each other but not nest, so that they add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds by phase; a phase entered several times counts each time."""
        self._started = time.perf_counter()
        self._current: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the body's time as `name`, also when it raises."""
        assert self._current is None, f"phase {name} inside phase {self._current}"
        self._current = name
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self._current = None

    def total(self) -> float:
        """Seconds since the timer was made."""
        return time.perf_counter() - self._started
