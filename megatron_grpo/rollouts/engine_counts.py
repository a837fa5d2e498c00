"""What engines had to do, asked of them by the driver for the metrics; nothing else depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayError

from megatron_grpo.data.engine_counts import EngineCounts

COUNTS_S = 20.0
"""Deadline of all answers together."""


def take_counts(engines: Sequence[Any]) -> list[EngineCounts]:
    """The counts of each engine (an actor) since the last call; those of one that fails or is late are zeros."""
    calls = [engine.take_counts.remote() for engine in engines]
    over, _ = ray.wait(calls, num_returns=len(calls), timeout=COUNTS_S)
    return [_counts(call) if call in over else EngineCounts() for call in calls]


def _counts(call: Any) -> EngineCounts:
    try:
        return cast(EngineCounts, ray.get(call))
    except RayError:
        return EngineCounts()
