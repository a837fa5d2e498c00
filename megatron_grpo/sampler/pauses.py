"""When vLLM's scheduler stands still: while nothing is in flight, and while weights change under what is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from megatron_grpo.sampler.requests import deaths_explained, while_alive

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

LEAVE_S = 10.0
"""Time that responses which were given up have to leave before something that needs the engine paused is refused."""
LOOK_S = 0.05


class Pauses:
    """Those of one engine, which begins with one. A pause empties the cache, unless that outlasts pauses.

    Args:
        llm: the engine.
        keeps_cache: whether its cache outlasts a pause.
        tell: called with the number of requests in flight when that changes.
    """

    def __init__(self, llm: AsyncLLM, *, keeps_cache: bool, tell: Callable[[int], None]) -> None:
        self._llm, self._keeps_cache, self._tell = llm, keeps_cache, tell
        self._in_flight = 0
        self._entry = asyncio.Lock()
        self._open = asyncio.Event()
        """Whether requests may enter; not while weights change under those in flight."""
        self._open.set()
        self._parking: asyncio.Task[None] | None = None
        """Pausing, or paused when done; None: responses are in flight."""
        self.pause()

    def pause(self) -> None:
        """Begin a pause; `paused` waits until the scheduler stands still."""
        self._parking = asyncio.create_task(self._park())

    async def paused(self) -> AsyncLLM:
        """The engine, once its scheduler stands still.

        Raises:
            RuntimeError: responses are in flight, and stay so.
        """
        began = time.monotonic()
        while self._parking is None and time.monotonic() < began + LEAVE_S:
            await asyncio.sleep(LOOK_S)  # whoever gave responses up did not wait for their end
        if self._parking is None:
            raise RuntimeError(f"{self._in_flight} responses are in flight: the weights cannot change under them")
        await self._parking
        return self._llm

    @asynccontextmanager
    async def entering(self, requests: int) -> AsyncIterator[None]:
        """In here so many requests are added: at a moment at which no weights change.

        If the engine was paused it goes on at the end: its scheduler sees all of them before it takes the first.
        """
        async with self._entrance():
            self._change(requests)  # from here on nobody pauses
            try:
                if self._parking is not None:
                    await self._parking
                yield
                if self._parking is not None:
                    await self._resume()
            except BaseException:
                self.left(requests)
                raise

    def left(self, requests: int) -> None:
        """So many requests are no longer in flight; the last one leaves a paused engine behind."""
        self._change(-requests)
        if requests and not self._in_flight and self._parking is None:
            self.pause()

    async def hold(self) -> None:
        """Let nobody enter until `release`, and pause what is in flight."""
        self._open.clear()
        async with self._entry:  # who is entering is in flight first
            if self._parking is None:
                self.pause()

    async def release(self) -> None:
        """Let what is in flight go on, and others enter."""
        if self._in_flight:
            await self._resume()
        self._open.set()

    @asynccontextmanager
    async def _entrance(self) -> AsyncIterator[None]:
        """Hold the entry, at a moment at which no weights change."""
        while True:
            await self._open.wait()
            async with self._entry:
                if self._open.is_set():  # it may have been closed while others were entering
                    yield
                    return

    def _change(self, requests: int) -> None:
        self._in_flight += requests
        self._tell(self._in_flight)

    async def _resume(self) -> None:
        self._parking = None
        with deaths_explained():
            await while_alive(self._llm, self._llm.resume_generation())

    async def _park(self) -> None:
        with deaths_explained():
            clear_cache = not self._keeps_cache
            await while_alive(self._llm, self._llm.pause_generation(mode="keep", clear_cache=clear_cache))
