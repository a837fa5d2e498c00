"""A rollout worker's clients of its engines: requests made at the same time go out as one call per engine."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, groupby
from typing import Any

from ray.exceptions import RayError

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.cluster.futures import build_overdue_error, explain_error, is_lost, wrap_for_pickling
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.cluster.process_names import ENGINE_NAME
from megatron_grpo.config.errors import EngineLostError, SamplingError
from megatron_grpo.rollouts.failures import RolloutFailure

LOOK_S = 0.5
"""Seconds between two checks for overdue engines."""


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not been answered yet."""

    request: GenerationRequest
    settings: SamplingSettings
    answer: asyncio.Future[GenerationOutput]
    call: str = ""
    """Name of the call in which the request was sent; empty: not sent yet."""
    index: int = 0
    """Position of the request in the call in which it was sent."""


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """The loss of an engine, which cannot answer any more."""

    restarts: int
    """Number of earlier replacements of the engine."""
    reason: str


class EngineClient:
    """Client of one engine. Requests of one round of the event loop are sent together, in their order.

    While an engine is lost, callers that ask it or wait for it get an error, until it is replaced.
    """

    def __init__(self, actor: Any, index: int, user: str) -> None:
        """
        Args:
            actor: Ray actor with `generate` and `abort` (see `VllmEngine`).
            index: number of the engine, for messages.
            user: name of the calling process, which makes the names of its calls unique.
        """
        self.name, self.number = ENGINE_NAME(index), index
        self.load = 0
        """Number of rollouts that are placed on this engine and still sampling."""
        self.loss: EngineLoss | None = None
        """The current loss of the engine; None: it is not lost."""
        self.restarts = 0
        """Number of replacements of the engine."""
        self.since = 0.0
        """Time of the last replacement, on the clock of the event loop."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called when the engine is lost."""
        self._actor = actor
        self._given_up: str | None = None
        self._usable = asyncio.Event()
        self._usable.set()
        self._look: asyncio.Task[None] | None = None
        self._calls = (f"{user}.{number}" for number in count())
        self._leaving: list[_OpenRequest] = []
        self._waiting: set[asyncio.Future[GenerationOutput]] = set()
        self._aborted: list[_OpenRequest] = []
        self._streams: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        """Sample one response; the engine stops sampling it if the caller is cancelled.

        Raises:
            RolloutFailure: the engine ended this request without a response.
            EngineLostError: the engine is lost; `replaced` waits for its replacement.
            SamplingError: the engine failed, or is lost and not replaced.
        """
        if self._given_up is not None:
            raise SamplingError(self._given_up)
        if self.loss is not None:
            raise EngineLostError(self.loss.reason)
        loop = asyncio.get_running_loop()
        asked = _OpenRequest(request, settings, loop.create_future())
        if not self._leaving:
            loop.call_soon(self._send)
        self._leaving.append(asked)
        self._waiting.add(asked.answer)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            self._abort(asked)
            raise
        finally:
            self._waiting.discard(asked.answer)

    @property
    def busy(self) -> bool:
        """Whether a caller waits for a response."""
        return bool(self._waiting)

    def lose(self, reason: str) -> None:
        """Mark the engine as lost: all waiting callers get an EngineLostError."""
        if self.loss is None:
            self.loss = EngineLoss(self.restarts, reason)
            self._usable.clear()
            _fail(self._waiting, EngineLostError(reason))
            self.on_loss()

    def replace(self, actor: Any) -> None:
        """Use this actor from now on; callers that still wait for the previous one get an EngineLostError."""
        self._actor, self.loss = actor, None
        self.restarts += 1
        self.since = asyncio.get_running_loop().time()
        _fail(self._waiting, EngineLostError(f"{self.name} was replaced"))
        self._usable.set()

    def give_up(self, reason: str) -> None:
        """Record that the engine is not replaced: callers get a SamplingError with this text from now on."""
        self._given_up = reason
        _fail(self._waiting, SamplingError(reason))
        self._usable.set()

    async def replaced(self) -> None:
        """Wait until the engine is usable; SamplingError if it is not replaced."""
        await self._usable.wait()
        if self._given_up is not None:
            raise SamplingError(self._given_up)

    async def is_lost(self) -> bool:
        """Check whether an overdue engine is lost; an engine with a hanging process counts as lost."""
        if self.loss is None:
            if self._look is None or self._look.done():
                self._look = asyncio.create_task(self._look_for_hanging())
            await asyncio.shield(self._look)
        return self.loss is not None

    async def _look_for_hanging(self) -> None:
        restarts = self.restarts
        hanging = await asyncio.to_thread(report_hanging, [self.name], "generation")
        if hanging and restarts == self.restarts:
            self.lose(f"generation: {self.name} did not answer in time{hanging}")

    def _send(self) -> None:
        leaving, self._leaving = self._leaving, []
        leaving = [asked for asked in leaving if not asked.answer.done()]
        for _, run in groupby(leaving, key=lambda asked: asked.settings):
            stream = asyncio.create_task(self._stream(next(self._calls), list(run)))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)

    async def _stream(self, call: str, asked: list[_OpenRequest]) -> None:
        for index, one in enumerate(asked):
            one.call, one.index = call, index
        restarts = self.restarts
        try:
            requests = wrap_for_pickling([one.request for one in asked])
            stream = self._actor.generate.options(num_returns="streaming").remote(requests, asked[0].settings, call)
            async for reference in stream:
                for index, output in await reference:
                    answer = asked[index].answer
                    if isinstance(output, str):
                        _fail([answer], RolloutFailure(output))
                    elif not answer.done():
                        answer.set_result(output)
        except RayError as error:
            others = await asyncio.to_thread(report_hanging, [self.name])
            reason = f"generation: {self.name} {explain_error(error)}{others}"
            if is_lost(error) and restarts == self.restarts:
                self.lose(reason)
            _fail((one.answer for one in asked), SamplingError(reason))
        finally:
            text = f"generation: {self.name} ended a call without an answer"
            _fail((one.answer for one in asked), SamplingError(text))

    def _abort(self, asked: _OpenRequest) -> None:
        if not asked.call:
            return  # not sent yet: `_send` leaves it out
        if not self._aborted:
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborted.append(asked)

    def _send_aborts(self) -> None:
        aborted, self._aborted = self._aborted, []
        for call, run in groupby(aborted, key=lambda asked: asked.call):
            self._actor.abort.remote(call, [asked.index for asked in run])


def _fail(answers: Iterable[asyncio.Future[GenerationOutput]], error: Exception) -> None:
    """Set an error on the answers that are still pending."""
    for answer in answers:
        if not answer.done():
            answer.set_exception(error)


class Engines:
    """The engines of a rollout worker, and the placement of rollouts on them."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.clients = list(clients)
        self._changed = asyncio.Event()
        for client in self.clients:
            client.on_loss = self._changed.set

    def by_number(self, number: int) -> EngineClient:
        """The client of the engine with this number."""
        return next(client for client in self.clients if client.number == number)

    def place(self, sizes: Sequence[int]) -> list[EngineClient]:
        """Choose an engine for each group of rollouts, so that loads become as equal as groups allow.

        A group stays on one engine, for the prefix cache, and neighbouring groups share an engine; among equally loaded
        engines the first ones are filled first. Each client's `load` is increased by the rollouts placed on it.

        Args:
            sizes: rollouts of each group.
        """
        loads = [client.load for client in self.clients]
        if len(sizes) == 1:
            client = self.clients[loads.index(min(loads))]
            client.load += sizes[0]
            return [client]
        level = _water_level(loads, sum(sizes))
        ends = list(accumulate(max(0.0, level - load) for load in loads))
        placed, begin = [], 0
        for size in sizes:
            client = self.clients[min(bisect_left(ends, begin + size / 2), len(ends) - 1)]
            client.load += size
            placed.append(client)
            begin += size
        return placed

    async def lose_overdue(self, deadline_s: float) -> None:
        """Mark engines as lost whose responses are overdue, counted from now or from the engine's replacement.

        Runs until it is cancelled. The stacks of overdue engines are read on a thread, because that takes seconds.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await asyncio.sleep(min(LOOK_S, deadline_s))
            passed = loop.time() - deadline_s
            slow = [client for client in self.clients if client.busy and max(began, client.since) <= passed]
            if not slow:
                continue
            restarts = [client.restarts for client in slow]
            reason = str(
                await asyncio.to_thread(build_overdue_error, "generation", [client.name for client in slow], deadline_s)
            )
            for client, before in zip(slow, restarts, strict=True):
                if client.restarts == before:
                    client.lose(reason)

    async def losses(self) -> dict[int, EngineLoss]:
        """Wait for a loss that was not returned before; returns all lost engines by number."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            found = {client.number: client.loss for client in self.clients if client.loss is not None}
            if found:
                return found


def _water_level(loads: Sequence[int], amount: int) -> float:
    """Common level that the least loaded engines reach when `amount` rollouts are added to `loads` (water filling)."""
    lowest: list[int] = []
    for load in sorted(loads):
        if lowest and (sum(lowest) + amount) / len(lowest) <= load:
            break
        lowest.append(load)
    return (sum(lowest) + amount) / len(lowest)
