"""Pauses of vLLM's scheduler: while no request is in flight, and while weights change under requests in flight.

Why every token has exactly one weight version: `hold` first closes the entry, then pauses vLLM with mode="keep". The
scheduler stops between two forward passes, so no pass computes with a mixture of weights, and requests in flight keep
the tokens that they have. The workers then load the new weights, vLLM is told the new version, and `release` resumes
the scheduler: each request continues where it stopped, and vLLM labels tokens from then on with the new version.
A response may therefore span versions (`GenerationOutput.spans`), a token cannot. Requests that arrive meanwhile wait
outside, because prompts are cached under the salt of a version, which is known only once the version is committed.
Keys and values of tokens before the pause are those of the old weights if the cache outlasts pauses; otherwise the
pause clears the cache, and the scheduler computes the sequences in flight again under the new weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from megatron_grpo.generation.vllm_requests import while_alive

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

LEAVE_S = 10.0
"""Seconds that aborted requests have to drain before an operation that needs a paused engine is refused."""
LOOK_S = 0.05


class Pauses:
    """The pauses of one engine, which starts paused. A pause empties the prefix cache unless `keeps_cache`.

    Args:
        llm: the engine.
        keeps_cache: whether the engine's cache outlasts a pause.
        tell: function that is called with the number of requests in flight when it changes.
    """

    def __init__(self, llm: AsyncLLM, *, keeps_cache: bool, tell: Callable[[int], None]) -> None:
        self._llm, self._keeps_cache, self._tell = llm, keeps_cache, tell
        self._in_flight = 0
        self._entry = asyncio.Lock()
        """Lock that is held while requests are added, and from `hold` to `release`."""
        self._held = False
        self._parking: asyncio.Task[None] | None = None
        """Task that pauses the scheduler, which is paused when it is done; None: responses are in flight."""
        self.pause()

    def pause(self) -> None:
        """Begin a pause; `paused` waits until the scheduler has stopped."""
        self._parking = asyncio.create_task(self._park())

    async def paused(self) -> AsyncLLM:
        """Wait until the scheduler has stopped, and return the engine.

        Raises:
            RuntimeError: responses are still in flight after LEAVE_S.
        """
        began = time.monotonic()
        while self._parking is None and time.monotonic() < began + LEAVE_S:
            await asyncio.sleep(LOOK_S)  # aborted requests may still be draining
        if self._parking is None:
            raise RuntimeError(f"{self._in_flight} responses are in flight: the weights cannot change under them")
        await self._parking
        return self._llm

    @asynccontextmanager
    async def entering(self, requests: int) -> AsyncIterator[None]:
        """Context in which requests are added; weights do not change meanwhile.

        A paused engine resumes at the end of the context: its scheduler sees all requests before it takes the first.
        """
        async with self._entry:
            self._change(requests)  # from here on no pause begins
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
        """Record that requests are no longer in flight; after the last one the engine is paused."""
        self._change(-requests)
        if requests and not self._in_flight and self._parking is None:
            self.pause()

    async def hold(self) -> None:
        """Make new requests wait until `release`, and pause requests in flight."""
        if not self._held:
            await self._entry.acquire()  # wait until requests that are being added are in flight
            self._held = True
        if self._parking is None:
            self.pause()

    @asynccontextmanager
    async def lifted(self) -> AsyncIterator[None]:
        """Context in which a paused engine runs, while new requests wait as before.

        Afterwards it is paused if the body failed or if no requests are in flight.
        """
        await self._resume()
        try:
            yield
        except BaseException:
            self.pause()
            raise
        if not self._in_flight:
            self.pause()

    async def release(self) -> None:
        """Resume requests in flight, and let waiting requests enter."""
        if self._in_flight and self._parking is not None:
            await self._resume()
        if self._held:
            self._held = False
            self._entry.release()

    def _change(self, requests: int) -> None:
        self._in_flight += requests
        self._tell(self._in_flight)

    async def _resume(self) -> None:
        self._parking = None
        await while_alive(self._llm, self._llm.resume_generation())

    async def _park(self) -> None:
        paused = self._llm.pause_generation(mode="keep", clear_cache=not self._keeps_cache)
        await while_alive(self._llm, paused)
