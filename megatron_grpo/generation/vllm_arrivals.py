"""Waiting for many of vLLM's requests in one place."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.output_processor import RequestOutputCollector

PACE_S = 0.02
"""Responses that come within this time of each other leave together: few large messages instead of many small ones."""


class Arrivals:
    """Stands in for the events of many of vLLM's queues, each of which gets one output: counts those that have."""

    def __init__(self, expected: int) -> None:
        self._left = expected
        self._some, self._all = asyncio.Event(), asyncio.Event()

    def set(self) -> None:
        """A queue has got its output."""
        self._left -= 1
        self._some.set()
        if not self._left:
            self._all.set()

    def clear(self) -> None:
        """A queue was emptied."""

    async def some(self) -> None:
        """Return when something has arrived: then after PACE_S, or as soon as it is everything."""
        await self._some.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(PACE_S):
                await self._all.wait()
        self._some.clear()


def drain(waiting: dict[int, RequestOutputCollector]) -> dict[int, RequestOutput]:
    """Take what has arrived out of the queues, and out of those that are waited for."""
    finals = {index: output for index, queue in waiting.items() if (output := queue.get_nowait()) is not None}
    for index in finals:
        del waiting[index]
    return finals
