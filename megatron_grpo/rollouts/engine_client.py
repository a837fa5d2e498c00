"""A rollout worker's client of an engine: requests made at the same time go out as one call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

from ray.exceptions import RayError

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.cluster.actor_calls import call_actor, stream_actor
from megatron_grpo.cluster.futures import explain_error, is_lost, wrap_for_pickling
from megatron_grpo.cluster.overdue import report_hanging
from megatron_grpo.cluster.process_log import ENGINE_NAME
from megatron_grpo.config.errors import EngineLostError, SamplingError
from megatron_grpo.generation.engine_interface import Engine
from megatron_grpo.rollouts.clock import RolloutClock
from megatron_grpo.rollouts.failures import RolloutFailure


@dataclass(slots=True)
class _OpenRequest:
    """A request that has not been answered yet."""

    content: GenerationRequest
    settings: SamplingSettings
    answer: asyncio.Future[GenerationOutput]
    call: str = ""  # name of the call in which the request was sent; empty: not sent yet
    index: int = 0  # of the request in this call


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """The loss of an engine, which cannot answer any more."""

    restarts: int  # earlier replacements of the engine
    reason: str
    is_final: bool = False  # the engine is not replaced


class EngineLeftError(Exception):
    """An engine has left, and others sample its rest."""


class EngineClient:
    """Client of one engine; sends simultaneous requests together."""

    def __init__(self, actor: Any, index: int, user: str, restarts: int = 0) -> None:
        # `user`, the name of the calling process, makes the names of its calls unique.
        self.name, self.number = ENGINE_NAME(index), index
        self.is_leaving = False  # no further rollouts are assigned to the engine
        self.has_left = False  # nor does it finish those that were
        self.load = 0  # rollouts that are assigned to this engine and still sampling
        self.loss: EngineLoss | None = None
        # The client puts itself here when its engine is lost; `Engines` gives its clients a common queue and clock.
        self.losses: asyncio.Queue[EngineClient] = asyncio.Queue()
        self.clock = RolloutClock()
        self.restarts = restarts  # replacements of the engine
        self.replaced_at = 0.0  # or since when the engine has had requests of another one; on the clock
        self._actor = actor
        self._is_decided = asyncio.Event()  # not set while a lost engine may still be replaced
        self._is_decided.set()
        self._hang_check: asyncio.Task[None] | None = None
        self._calls = (f"{user}.{number}" for number in count())
        self._unsent: list[_OpenRequest] = []
        self._pending: set[asyncio.Future[GenerationOutput]] = set()
        self._aborted: list[_OpenRequest] = []
        self._streams: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        """Sample one response; a cancelled caller stops the sampling.

        Raises RolloutFailure if the engine ended this request without a response, EngineLostError if the engine is lost
        (`wait_replaced` waits for its replacement), SamplingError if it failed, or is lost and not replaced.
        """
        if self.loss is not None:
            raise SamplingError(self.loss.reason) if self.loss.is_final else EngineLostError(self.loss.reason)
        loop = asyncio.get_running_loop()
        open_request = _OpenRequest(request, settings, loop.create_future())
        # The samples of a batch send their requests in one round of the event loop. One message carries them in this
        # order, because responses are only reproducible if the engine gets all of them at once.
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append(open_request)
        self._pending.add(open_request.answer)
        try:
            return await open_request.answer
        except asyncio.CancelledError:
            if open_request.call:  # `_send` leaves out a request that is not sent yet
                if not self._aborted:
                    loop.call_soon(self._send_aborts)
                self._aborted.append(open_request)
            raise
        finally:
            self._pending.discard(open_request.answer)

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    def mark_lost(self, reason: str) -> None:
        """Mark the engine as lost; waiting callers get EngineLostError."""
        if self.loss is None:
            self.loss = EngineLoss(self.restarts, reason)
            self._is_decided.clear()
            _set_error(self._pending, EngineLostError(reason))
            self.losses.put_nowait(self)

    def replace(self, actor: Any) -> None:
        self._actor, self.loss = actor, None
        self.restarts += 1
        self.replaced_at = self.clock.time()
        _set_error(self._pending, EngineLostError(f"{self.name} was replaced"))
        self._is_decided.set()

    def give_up(self, reason: str) -> None:
        self.loss = EngineLoss(self.restarts, reason, is_final=True)
        _set_error(self._pending, SamplingError(reason))
        self._is_decided.set()

    def hand_back(self) -> None:
        """Use the engine no more; waiting callers get EngineLostError."""
        self.is_leaving = self.has_left = True
        self.loss = EngineLoss(self.restarts, f"{self.name} has left the run")
        _set_error(self._pending, EngineLostError(self.loss.reason))
        self._is_decided.set()

    async def wait_replaced(self) -> None:
        """Wait until the engine is usable; SamplingError or EngineLeftError if never."""
        await self._is_decided.wait()
        if self.has_left:
            raise EngineLeftError
        if self.loss is not None and self.loss.is_final:
            raise SamplingError(self.loss.reason)

    async def is_lost(self) -> bool:
        """True if the engine is lost; one that hangs is marked so."""
        if self.loss is None:
            if self._hang_check is None or self._hang_check.done():
                self._hang_check = asyncio.create_task(self._check_hanging())
            await asyncio.shield(self._hang_check)  # callers share it, and one may be cancelled
        return self.loss is not None

    async def _check_hanging(self) -> None:
        restarts = self.restarts
        # On a thread, because it reads heartbeats and stacks; the engine may be replaced meanwhile.
        hanging = await asyncio.to_thread(report_hanging, [self.name], "generation")
        if hanging and restarts == self.restarts:
            self.mark_lost(f"generation: {self.name} did not answer in time{hanging}")

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        unsent = [request for request in unsent if not request.answer.done()]
        for _, run in groupby(unsent, key=lambda request: request.settings):
            stream = asyncio.create_task(self._stream(next(self._calls), list(run)))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)

    async def _stream(self, call: str, requests: list[_OpenRequest]) -> None:
        for index, request in enumerate(requests):
            request.call, request.index = call, index
        restarts = self.restarts
        try:
            message = wrap_for_pickling([request.content for request in requests])
            async for reference in stream_actor(self._actor, Engine.generate, message, requests[0].settings, call):
                for index, output in await reference:
                    answer = requests[index].answer
                    if isinstance(output, str):
                        _set_error([answer], RolloutFailure(output))
                    elif not answer.done():
                        answer.set_result(output)
        except RayError as error:
            hanging = await asyncio.to_thread(report_hanging, [self.name])
            reason = f"generation: {self.name} {explain_error(error)}{hanging}"
            # The end of a previous actor is no loss of the current one.
            if is_lost(error) and restarts == self.restarts:
                self.mark_lost(reason)
            _set_error((request.answer for request in requests), SamplingError(reason))
        finally:
            text = f"generation: {self.name} ended a call without an answer"
            _set_error((request.answer for request in requests), SamplingError(text))

    def _send_aborts(self) -> None:
        aborted, self._aborted = self._aborted, []
        for call, run in groupby(aborted, key=lambda request: request.call):
            call_actor(self._actor, Engine.abort, call, [request.index for request in run])


def _set_error(answers: Iterable[asyncio.Future[GenerationOutput]], error: Exception) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(error)
