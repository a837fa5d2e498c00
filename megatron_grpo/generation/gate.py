"""The gate of an engine: when requests may enter, and when vLLM's scheduler is paused.

The scheduler is paused while no request is in flight, and while weights change or an engine sleeps under requests in
flight.

Why every token has exactly one weight version: `close` first keeps new requests out, then pauses vLLM with mode="keep".
The scheduler stops between two forward passes, so no pass computes with a mixture of weights, and requests in flight
keep the tokens that they have. The workers then load the new weights, vLLM is told the new version, and `open` resumes
the scheduler: each request continues where it stopped, and vLLM labels tokens from then on with the new version.
A response may therefore span versions (`GenerationOutput.spans`), a token cannot. Requests that arrive meanwhile wait
outside, because prompts are cached under the salt of a version, which is known only once the version is committed.
Keys and values of tokens before the pause are those of the old weights if the cache outlasts pauses; otherwise the
pause clears the cache, and the scheduler computes the sequences in flight again under the new weights. An engine that
sleeps loses its cache in any case; it goes on when it has both its weights and its memory again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

from megatron_grpo.generation.engine_processes import await_alive

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

DRAIN_S = 10.0  # an operation that needs a paused engine waits this long for aborted requests
POLL_S = 0.05

Cause = Literal["weights", "memory"]  # missing while the gate is closed; memory: the engine sleeps


@dataclass(eq=False)
class Gate:
    """Lets requests into one engine, which starts open and paused."""

    llm: AsyncLLM
    _: KW_ONLY
    updates_in_flight: bool  # requests pause or wait while the gate is closed; otherwise new ones are refused
    keeps_cache: bool  # the engine's prefix cache outlasts a pause; otherwise a pause empties it
    on_change: Callable[[int], None]  # called with the number of requests in flight when it changes

    def __post_init__(self) -> None:
        self.in_flight = 0  # requests
        self._reasons: dict[Cause, str] = {}
        self._admission_lock = asyncio.Lock()  # held while requests are added, and by `close` while weights change
        self._is_held_closed = False  # `close` holds the lock
        # The task that pauses the scheduler; once it has ended, the scheduler is paused. None: the scheduler runs.
        self._pause_task: asyncio.Task[None] | None = None
        self.pause()

    def require_open(self) -> None:
        """Raise RuntimeError with the reason if requests are refused now."""
        if self._reasons and not self.updates_in_flight:
            raise RuntimeError(next(iter(self._reasons.values())))

    def is_closed(self, cause: Cause) -> bool:
        return cause in self._reasons

    async def close(self, cause: Cause, reason: str) -> None:
        """Refuse new requests with this reason, or let them wait, until no cause remains."""
        self._reasons[cause] = reason
        if self.updates_in_flight:
            if not self._is_held_closed:
                await self._admission_lock.acquire()  # wait until requests that are being added are in flight
                self._is_held_closed = True
            if self._pause_task is None:
                self.pause()

    async def open(self, cause: Cause) -> None:
        """Let requests enter and continue, unless another cause remains."""
        self._reasons.pop(cause, None)
        if self._reasons or not self._is_held_closed:
            return
        if self.in_flight and self._pause_task is not None:
            await self._pause_task
            await self._resume()
        self._is_held_closed = False
        self._admission_lock.release()

    def pause(self) -> None:
        """Begin a pause; `wait_paused` waits until the scheduler has stopped."""
        call = self.llm.pause_generation(mode="keep", clear_cache=not self.keeps_cache)
        self._pause_task = asyncio.create_task(await_alive(self.llm, call))

    async def wait_paused(self) -> AsyncLLM:
        """Wait for the pause; RuntimeError: responses are in flight after DRAIN_S."""
        began = time.monotonic()
        while self._pause_task is None and time.monotonic() < began + DRAIN_S:
            await asyncio.sleep(POLL_S)  # aborted requests may still be draining
        if self._pause_task is None:
            raise RuntimeError(f"{self.in_flight} responses are in flight: the weights cannot change under them")
        await self._pause_task
        return self.llm

    @asynccontextmanager
    async def admission(self, requests: int) -> AsyncIterator[None]:
        """Context in which requests are added; a paused engine resumes after it."""
        async with self._admission_lock:
            self._count(requests)  # from here on no pause begins
            try:
                if self._pause_task is not None:
                    await self._pause_task
                yield
                if self._pause_task is not None:
                    await self._resume()
            except BaseException:
                self.leave(requests)
                raise

    def leave(self, requests: int) -> None:
        """Record ended requests; the last one pauses the engine."""
        self._count(-requests)
        if requests and not self.in_flight and self._pause_task is None:
            self.pause()

    @asynccontextmanager
    async def running_scheduler(self) -> AsyncIterator[None]:
        """Context in which a closed engine's scheduler runs, without new requests."""
        await self._resume()
        try:
            yield
        except BaseException:
            self.pause()
            raise
        if not self.in_flight:
            self.pause()

    def _count(self, requests: int) -> None:
        self.in_flight += requests
        self.on_change(self.in_flight)

    async def _resume(self) -> None:
        self._pause_task = None
        await await_alive(self.llm, self.llm.resume_generation())
