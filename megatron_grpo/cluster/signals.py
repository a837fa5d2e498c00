"""How a driver is told to end, and how those are ended who cannot be told."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil


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


@contextmanager
def own_sigterm_handler_kept() -> Iterator[None]:
    """Put back this process's answer to SIGTERM after the body: `ray.init` replaces it by one that ends Ray first."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def kill_stopped(processes: Iterable[psutil.Process]) -> None:
    """Kill those of the processes that are stopped (SIGSTOP): they hear of nobody's end, and would stay."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()
