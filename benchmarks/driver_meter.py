"""What the driver of a run uses up: CPU time, bytes that go through it, memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import ray
from numpy.typing import NDArray

MEMORY_PERIOD_S = 0.05
ENVELOPE_BYTES = 1500
"""What Ray adds to an array that it serialises, at most."""


@dataclass
class Meter:
    """What the driver, this process, has used up to each mark: CPU time, bytes to and from Ray, memory."""

    bytes_moved: int = 0
    """Bytes of objects that were serialised or deserialised in the driver: arguments, results, what is put and got."""
    begin_bytes: int = 0
    """Resident memory when `watching` began."""
    peak_bytes: int = 0
    """Largest resident memory since `watching` began."""
    marks: list[tuple[float, float, int]] = field(default_factory=list)
    """Wall-clock seconds, CPU seconds of all threads and bytes moved: when each step began, and when the last ended."""

    def mark(self) -> None:
        """A step begins, or the last one has ended."""
        self.marks.append((time.perf_counter(), time.process_time(), self.bytes_moved))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count bytes and watch memory. Ray must be running."""
        process, ended = psutil.Process(), threading.Event()

        def watch() -> None:
            while not ended.wait(MEMORY_PERIOD_S):
                self.peak_bytes = max(self.peak_bytes, process.memory_info().rss)

        thread = threading.Thread(target=watch, daemon=True)
        with self._counting():
            self._require_exact()
            self.bytes_moved = 0
            self.begin_bytes = self.peak_bytes = process.memory_info().rss
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Everything that Ray's Python half hands to or takes from its core goes through two methods of one object."""
        context = ray._private.worker.global_worker.get_serialization_context()
        serialize, deserialize = context.serialize, context.deserialize_objects

        def counted_serialize(value: Any) -> Any:
            serialized = serialize(value)
            self.bytes_moved += serialized.total_bytes
            return serialized

        def counted_deserialize(serialized: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            self.bytes_moved += sum(0 if data is None else len(data) for data, *_ in serialized)
            return deserialize(serialized, *args, **kwargs)

        context.serialize, context.deserialize_objects = counted_serialize, counted_deserialize
        try:
            yield
        finally:
            del context.serialize, context.deserialize_objects

    def _require_exact(self) -> None:
        """Move objects of known sizes each way that a driver can, and compare."""
        large, small = np.zeros(2**20, dtype=np.uint8), np.zeros(2**12, dtype=np.uint8)
        ways: tuple[Callable[[NDArray[np.uint8]], Any], ...] = (
            ray.put,
            lambda array: _make_array.remote(0, array),
            lambda array: ray.get(_make_array.remote(len(array))),
        )
        for array in (large, small):
            for way in ways:
                self.bytes_moved = 0
                way(array)
                counted, expected = self.bytes_moved, array.nbytes
                if not expected <= counted < expected + ENVELOPE_BYTES:
                    raise RuntimeError(
                        f"this Ray moves objects past the counter: {counted} bytes for one of {expected}"
                    )


@ray.remote(num_cpus=0)
def _make_array(size: int, _: Any = None) -> NDArray[np.uint8]:
    """[size], uint8: an array that comes from another process."""
    return np.zeros(size, dtype=np.uint8)
