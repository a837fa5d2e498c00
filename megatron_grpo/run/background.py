"""Work that goes on in a thread of its own while processes start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from typing import TypeVar

T = TypeVar("T")
AT_ONCE_S = 10.0
"""Seconds that are waited before anything else starts: time to read some 10 GB, and to find most that can be wrong."""


@contextmanager
def in_background(work: Callable[[Event], T], at_once_s: float = AT_ONCE_S) -> Iterator[Future[T]]:
    """Begin `work` and yield its result to come. What it raises soon is raised here, before the body begins.

    Args:
        work: called with an event that is set when the body ends, which it should look at now and then.
        at_once_s: seconds to wait for it before the body begins.
    """
    stop = Event()
    with ThreadPoolExecutor(1, "background") as pool:
        try:
            future = pool.submit(work, stop)
            if wait([future], at_once_s).done:
                future.result()
            yield future
        finally:
            stop.set()
