"""The clock of rollouts' deadlines, which stands still while engines sleep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RolloutClock:
    """Seconds of the event loop in which the engines were awake.

    Engines on shared devices sleep while models train. A response in flight goes on afterwards, so the time that it
    slept is no delay of its own.
    """

    def __init__(self) -> None:
        self._asleep_since: float | None = None
        self._slept_s = 0.0
        self._deadlines: dict[asyncio.Timeout, float] = {}  # on this clock

    def time(self) -> float:
        """Return the seconds so far, from an arbitrary beginning."""
        now = asyncio.get_running_loop().time() if self._asleep_since is None else self._asleep_since
        return now - self._slept_s

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Context that ends with TimeoutError after these seconds."""
        async with self.timeout_at(self.time() + seconds):
            yield

    @asynccontextmanager
    async def timeout_at(self, deadline: float) -> AsyncIterator[None]:
        """Context that ends with TimeoutError at this time of the clock."""
        async with asyncio.timeout(None) as timeout:
            self._deadlines[timeout] = deadline
            self._schedule(timeout)
            try:
                yield
            finally:
                del self._deadlines[timeout]

    def stop(self) -> None:
        """Stand still from now on: the engines go to sleep; idempotent."""
        if self._asleep_since is None:
            self._asleep_since = asyncio.get_running_loop().time()
            self._schedule(*self._deadlines)

    def restart(self) -> None:
        """Run again: the engines are awake; idempotent."""
        if self._asleep_since is not None:
            self._slept_s += asyncio.get_running_loop().time() - self._asleep_since
            self._asleep_since = None
            self._schedule(*self._deadlines)

    def _schedule(self, *timeouts: asyncio.Timeout) -> None:
        for timeout in timeouts:
            if not timeout.expired():
                when = self._deadlines[timeout] + self._slept_s
                timeout.reschedule(when if self._asleep_since is None else None)
