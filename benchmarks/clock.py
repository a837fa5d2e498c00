"""How long a call takes on a device: on a GPU when it is warm, by its own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP, REPEATS = 3, 10


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call: on CUDA the median of `REPEATS` after `WARM_UP`, elsewhere the first and only."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1000)
    return statistics.median(times)
