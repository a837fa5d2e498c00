"""The engines as a rollout worker sees them: what is asked in one moment goes out as one call per engine."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count, groupby
from typing import Any

from ray.exceptions import RayError

from megatron_grpo.cluster.futures import explain, overdue
from megatron_grpo.cluster.late import report_hanging
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.packed import Packed
from megatron_grpo.data.responses import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.rollouts.failures import RolloutFailure

ENGINE_NAME = "generation engine {}".format


@dataclass(slots=True)
class _Asked:
    """A request that has not been answered yet."""

    request: GenerationRequest
    settings: SamplingSettings
    answer: asyncio.Future[GenerationOutput]
    call: str = ""
    """Name of the call that the request went out with; empty: none yet."""
    index: int = 0
    """Place of the request in the call that it went out with."""


class EngineClient:
    """One engine. Requests that are asked for while the event loop goes round once leave together, in their order."""

    def __init__(self, actor: Any, index: int, user: str) -> None:
        """
        Args:
            actor: Ray actor with `generate` and `abort` (see `VllmEngine`).
            index: number of the engine, for messages.
            user: name of the asking process, which makes the names of its calls unique.
        """
        self.name = ENGINE_NAME(index)
        self.load = 0
        """Rollouts that are placed here and not through with sampling."""
        self._actor = actor
        self._calls = (f"{user}.{number}" for number in count())
        self._leaving: list[_Asked] = []
        self._waiting: set[asyncio.Future[GenerationOutput]] = set()
        self._aborted: list[_Asked] = []
        self._streams: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        """One response. Whoever stops waiting for it (a timeout) makes the engine stop, too.

        Raises:
            RolloutFailure: the engine gave up this request.
            SamplingError: the engine failed.
        """
        loop = asyncio.get_running_loop()
        asked = _Asked(request, settings, loop.create_future())
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
        """Whether somebody waits for a response."""
        return bool(self._waiting)

    def fail(self, reason: str) -> None:
        """Everybody who waits gets a SamplingError with this text."""
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(SamplingError(reason))

    def _send(self) -> None:
        leaving, self._leaving = self._leaving, []
        leaving = [asked for asked in leaving if not asked.answer.done()]
        for _, run in groupby(leaving, key=lambda asked: asked.settings):
            stream = asyncio.create_task(self._stream(next(self._calls), list(run)))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)

    async def _stream(self, call: str, asked: list[_Asked]) -> None:
        for index, one in enumerate(asked):
            one.call, one.index = call, index
        try:
            requests = Packed([one.request for one in asked])
            stream = self._actor.generate.options(num_returns="streaming").remote(requests, asked[0].settings, call)
            async for reference in stream:
                for index, output in await reference:
                    _settle(asked[index].answer, output)
        except RayError as error:
            others = await asyncio.to_thread(report_hanging, [self.name])
            self._unanswered(asked, f"generation: {self.name} {explain(error)}{others}")
        finally:
            self._unanswered(asked, f"generation: {self.name} ended a call without an answer")

    @staticmethod
    def _unanswered(asked: Sequence[_Asked], reason: str) -> None:
        for one in asked:
            if not one.answer.done():
                one.answer.set_exception(SamplingError(reason))

    def _abort(self, asked: _Asked) -> None:
        if not asked.call:
            return  # `_send` leaves it out
        if not self._aborted:
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborted.append(asked)

    def _send_aborts(self) -> None:
        aborted, self._aborted = self._aborted, []
        for call, run in groupby(aborted, key=lambda asked: asked.call):
            self._actor.abort.remote(call, [asked.index for asked in run])


def _settle(answer: asyncio.Future[GenerationOutput], output: GenerationOutput | str) -> None:
    if answer.done():
        return
    if isinstance(output, str):
        answer.set_exception(RolloutFailure(output))
    else:
        answer.set_result(output)


class Engines:
    """The engines that a rollout worker uses, and who goes to which."""

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self.clients = list(clients)

    def place(self, sizes: Sequence[int]) -> list[EngineClient]:
        """An engine for each group of rollouts, so that all engines come as close to equal load as groups allow.

        A group stays together, for the sake of the prefix cache, and neighbouring groups share an engine; among equally
        loaded engines the first ones are filled first. Each client's `load` counts what is placed on it.

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

    async def fail_busy_after(self, deadline_s: float) -> None:
        """Once the deadline passes, whoever waits for a response fails with a message that names the late engines.

        Reading the late ones' stacks takes seconds, in which this process goes on.
        """
        await asyncio.sleep(deadline_s)
        late = [client for client in self.clients if client.busy]
        reason = str(await asyncio.to_thread(overdue, "generation", [client.name for client in late], deadline_s))
        for client in late:
            client.fail(reason)


def _water_level(loads: Sequence[int], amount: int) -> float:
    """The level that `amount` more, poured over engines that are filled to `loads`, reaches."""
    lowest: list[int] = []
    for load in sorted(loads):
        if lowest and (sum(lowest) + amount) / len(lowest) <= load:
            break
        lowest.append(load)
    return (sum(lowest) + amount) / len(lowest)
