"""An engine that computes nothing: it answers requests after the time that a model gives to its batch of responses."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from simulated_parts import RIGHT, WRONG, Member, Times

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.cluster.actor_processes import ActorProcesses
from megatron_grpo.cluster.futures import wrap_for_pickling
from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.config.generation_schema import EngineMemory, RefitMode
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.engine_interface import EngineStart, LoaderTrace, TensorShapes
from megatron_grpo.generation.vllm_requests import iterate_finished
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.planning.engine_shards import assume_boxes
from megatron_grpo.weight_sync.boxes import pack_boxes
from megatron_grpo.weight_sync.refit_group import Rendezvous

TICK_S = 0.02
"""Seconds of the clock within which responses that end are answered together."""


@dataclass(slots=True, order=True)
class Response:
    """A response that is being decoded, ordered by its end."""

    end: float
    """The decoder's clock at which all tokens are there."""
    tokens: int
    spans: list[Span] = field(compare=False)
    version: int = field(compare=False)
    """Version of the weights that draw its tokens now."""
    answer: asyncio.Future[list[Span]] = field(compare=False)


class Decoder:
    """Decodes responses together. Its clock counts decoding steps: each gives one token to every running response."""

    def __init__(self, times: Times, limit: int) -> None:
        """
        Args:
            times: seconds of a decoding step by the number of running responses.
            limit: most responses that run at once; others wait.
        """
        self._times, self._limit = times, limit
        self.version = 0
        self.speed = 1.0
        """Share of the usual speed."""
        self.counts = EngineCounts()
        self._clock = 0.0
        self._running: list[Response] = []
        self._waiting: deque[Response] = deque()
        self._changed = asyncio.Event()
        self._is_paused = False
        self._loop = asyncio.create_task(self._decode())

    async def decoded(self, tokens: int) -> list[Span]:
        """Wait until a response of so many tokens is decoded; returns the versions that drew its tokens."""
        answer: asyncio.Future[list[Span]] = asyncio.get_running_loop().create_future()
        self._waiting.append(Response(0.0, tokens, [], self.version, answer))
        self._changed.set()
        return await answer

    def pause(self) -> None:
        """Decode nothing until `resume`."""
        self._is_paused = True
        self._changed.set()

    def resume(self, version: int) -> None:
        """Decode with the weights of this version."""
        for response in self._running:
            self._add_span(response)
            response.version = version
        self.version, self._is_paused = version, False
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End all responses with an error, and decode nothing any more."""
        self._loop.cancel()
        for response in (*self._running, *self._waiting):
            if not response.answer.done():
                response.answer.set_exception(error)
        self._running, self._waiting = [], deque()

    async def _decode(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            self._admit()
            self._changed.clear()
            if self._is_paused or not self._running:
                await self._changed.wait()
                continue
            step_s = self._times.decoding_s(len(self._running)) / (self.speed * self._times.speed_up)
            began, remaining = now(), (self._running[0].end - self._clock) * step_s
            try:
                async with asyncio.timeout(max(remaining, TICK_S)):
                    await self._changed.wait()
            except TimeoutError:
                pass
            passed = now() - began
            self._clock += passed / step_s
            self.counts.busy_s += passed * self._times.speed_up
            while self._running and self._running[0].end <= self._clock:
                self._finish(heapq.heappop(self._running))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limit:
            response = self._waiting.popleft()
            response.end, response.version = self._clock + response.tokens, self.version
            if not response.answer.done():
                heapq.heappush(self._running, response)
        self.counts.running = max(self.counts.running, len(self._running))
        self.counts.waiting = max(self.counts.waiting, len(self._waiting))

    def _finish(self, response: Response) -> None:
        self._add_span(response)
        self.counts.tokens += response.tokens
        if not response.answer.done():
            response.answer.set_result(response.spans)

    def _add_span(self, response: Response) -> None:
        """Record the tokens since the last span as drawn by the version that the response has."""
        begin = response.spans[-1].end if response.spans else 0
        end = min(response.tokens, max(begin, response.tokens - round(response.end - self._clock)))
        if end > begin:
            response.spans.append(Span(begin, end, response.version))


class SimulatedEngine:
    """Stands in for `VllmEngine`; its responses have lengths and rewards that follow from their seeds."""

    def __init__(self, times: Times, settings: VllmSettings) -> None:
        self._times, self._settings = times, settings
        self._members: list[Member] = []
        self._lost: EngineLostError | None = None

    async def start(self) -> EngineStart:
        """Begin to decode; the engine has no processes of its own."""
        self._decoder = Decoder(self._times, self._settings.config.sequences_per_engine)
        return EngineStart({"processes": 0.0}, ActorProcesses(ray.get_runtime_context().get_node_id(), ()), settings={})

    def set_speed(self, speed: float) -> None:
        """From now on decode at this share of the usual speed."""
        self._decoder.speed = speed

    async def die_after(self, seconds: float) -> None:
        """End with an error, as an engine one of whose processes is gone, after some seconds."""
        await self._times.pass_by(seconds)
        self.die()

    def die(self) -> None:
        """End with an error now."""
        self._lost = EngineLostError(f"a process of generation engine {self._settings.index} has ended (simulated)")
        self._decoder.fail(self._lost)

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str
    ) -> AsyncIterator[Any]:
        """Responses as they become complete, in the place of `VllmEngine.generate`."""
        self._require_alive()
        waiting = {
            asyncio.create_task(self._response(request, settings)): index for index, request in enumerate(requests)
        }
        try:
            async for finished in iterate_finished(waiting):
                yield wrap_for_pickling([(index, task.result()) for index, task in finished.items()])
        finally:
            for task in waiting:
                task.cancel()

    async def abort(self, call: str, indices: list[int]) -> None:
        """Nothing: simulated responses are never given up."""

    def take_counts(self) -> EngineCounts:
        """As `VllmEngine.take_counts`."""
        self._require_alive()
        counts, self._decoder.counts = self._decoder.counts, EngineCounts()
        return counts

    async def trace_weights(self, mode: RefitMode, tensors: TensorShapes, needs_boxes: bool) -> list[LoaderTrace]:
        """Assume what vLLM's loaders do."""
        self._require_alive()
        shape = read_model_shape(self._settings.model_path)
        engine = assume_boxes(shape, self._settings.config.parallel)
        return [
            LoaderTrace(digest="", boxes=pack_boxes(boxes) if needs_boxes else "", converts=False) for boxes in engine
        ]

    async def connect_weights(self, mode: RefitMode, source: dict[str, Any], first_receiver: int) -> None:
        """Read the plan of each of the engine's ranks."""
        self._require_alive()
        ranks = range(first_receiver, first_receiver + self._settings.config.parallel.ranks_per_engine)
        store = Rendezvous(**source["rendezvous"])
        members = (asyncio.to_thread(Member, self._times, store, "target", rank) for rank in ranks)
        self._members = await asyncio.gather(*members)

    async def receive_weights(self, version: int) -> None:
        """Decode nothing from now on, and pass the time of the transfer."""
        self._require_alive()
        self._decoder.pause()
        await asyncio.gather(*(member.transfer() for member in self._members))

    def commit_weights(self, version: int, awaits_canary: bool = False) -> None:
        """Go on decoding with this version; no canary asks for its log-probabilities before."""
        self._require_alive()
        self._decoder.resume(version)

    async def sleep(self) -> None:
        """Pass the time in which the engine's memory moves."""
        await self._times.pass_by(self._times.move_s)

    async def wake(self, part: EngineMemory) -> None:
        """Pass the time in which a part of the engine's memory moves."""
        await self._times.pass_by(self._times.move_s)

    def shutdown(self) -> None:
        """Nothing: the host ends with the run."""

    def _require_alive(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def _response(self, request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
        tokens, is_cut_off, is_right = self._times.drawn(request, settings)
        spans = await self._decoder.decoded(tokens)
        return GenerationOutput(
            token_ids=np.zeros(tokens, dtype=np.int32),
            logprobs=np.zeros(tokens, dtype=np.float32),
            text=RIGHT if is_right else WRONG,
            stop_reason="length" if is_cut_off else "stop",
            spans=spans,
        )
