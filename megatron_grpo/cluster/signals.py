"""How a driver is told to end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM (Slurm's preemption, `kill`) unwind like Ctrl-C, so that every process is ended."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt("SIGTERM")

    previous: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
