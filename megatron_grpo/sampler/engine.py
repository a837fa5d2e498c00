"""One vLLM engine inside a Ray actor: a stream of responses to many requests, and its half of a refit."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from megatron_grpo.cluster.futures import pickled
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log, level_of_libraries
from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.config.generation_schema import EngineMemory, RefitMode
from megatron_grpo.data.responses import EngineCounts, GenerationRequest, SamplingSettings
from megatron_grpo.platform.device import current_platform, require_gpus
from megatron_grpo.platform.hooks import check_hooks
from megatron_grpo.sampler.arguments import VllmSettings, engine_arguments
from megatron_grpo.sampler.pauses import Pauses
from megatron_grpo.sampler.plugin import ENGINE_MARKER
from megatron_grpo.sampler.requests import (
    EngineStatistics,
    deaths_explained,
    in_bunches,
    responses,
    sampling_params,
    while_alive,
)
from megatron_grpo.sampler.shutdown import EngineProcesses, end_own, own_processes

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


def prepare_processes(settings: VllmSettings, name: str) -> None:
    """Set vLLM's variables in this process, whose children inherit them; variables that the user has set stay.

    `name` is the engine's name in logs and heartbeats.
    """
    os.environ[ENGINE_MARKER] = name
    os.environ.setdefault("VLLM_LOGGING_LEVEL", level_of_libraries())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")  # for the other workers, when one has died
    if settings.config.engine.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if current_platform().name == "cpu":
        from megatron_grpo.cpu.engine import prepare_cpu_processes

        prepare_cpu_processes(settings)


class VllmEngine:
    """Ray actor. While nothing is in flight, generation is paused and its prefix cache empty.

    So no batch depends on an earlier one, and the scheduler sees all requests of a call before it takes the first. Only
    with `VllmSettings.in_flight` may weights change while something is in flight, and a cache outlast a pause.
    """

    _pauses: Pauses
    """Set by `start`."""

    def __init__(self, settings: VllmSettings) -> None:
        self._name = f"generation engine {settings.index}"
        begin_process_log(self._name)
        self._settings = settings
        self._llm: AsyncLLM | None = None
        self._unusable: str | None = None
        self._asleep = False
        self._statistics = EngineStatistics()
        self._salt: str | None = None
        """Separates prompts that are cached under different weights, where a cache outlasts them."""

    @phase("start")
    async def start(self) -> tuple[dict[str, float], EngineProcesses]:
        """Start the processes, load the weights of the model folder and run one small batch.

        Returns:
            Seconds by part: "imports" of vLLM in this process; "processes": starting the others and loading weights;
            "warm_up": the batch. And the engine's processes, for the driver to end when this actor no longer can.
        """
        times = [time.monotonic()]
        require_gpus(ray.get_gpu_ids())
        prepare_processes(self._settings, self._name)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        check_hooks(current_platform().name)
        times.append(time.monotonic())
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**engine_arguments(self._settings)), stat_loggers=[self._statistics]
        )
        self._statistics.attach(self._llm)
        if current_platform().name == "cpu":
            from megatron_grpo.cpu.engine import forget_sockets

            forget_sockets()
        await self._llm.update_weight_version("0")  # the weights of the model folder
        self._pauses = Pauses(self._llm, keeps_cache=self._settings.keeps_cache, tell=self._statistics.in_flight)
        times.append(time.monotonic())
        await self._warm_up()
        self._statistics.take()
        # Nothing made so far is garbage; looking through all of it every few seconds costs a third of a second.
        gc.freeze()
        times.append(time.monotonic())
        parts = ("imports", "processes", "warm_up")
        seconds = {part: end - begin for part, (begin, end) in zip(parts, pairwise(times), strict=True)}
        return seconds, own_processes()

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Any]:
        """Sample all requests, and yield responses as they are complete; a streaming generator of Ray.

        The same requests under the same weights give the same bits when they come to an engine that is idle: every
        request has its own seed, and the scheduler sees all of them, in order, before it takes the first. Calls that
        come while others are in flight join them.

        Args:
            requests: the responses to sample, each with its prompt and seed.
            settings: temperature, filters and stop conditions of all requests.
            call: name of this call among those in flight, for `abort`.

        Yields:
            Some responses, as a list[tuple[int, GenerationOutput | str]] when it arrives: each with the number of its
            request, and instead of a response the reason why there is none.

        Raises:
            EngineLostError: a process of the engine has ended.
            RuntimeError: the engine cannot sample; the message says why.
        """
        if self._unusable is not None and self._settings.in_flight is None:
            raise RuntimeError(self._unusable)
        if self._asleep:
            raise RuntimeError("the engine sleeps: its devices are those of the models in training for now")
        assert self._llm is not None, "start() comes first"
        waiting: dict[asyncio.Task[RequestOutput], int] = {}
        with phase("generate"), deaths_explained():
            try:
                waiting = await self._add(call, requests, settings)
                async for done in in_bunches(waiting):
                    self._pauses.left(len(done))
                    finals = {index: task.result() for index, task in done.items()}
                    self._statistics.completed(sum(len(final.outputs[0].token_ids) for final in finals.values()))
                    yield pickled(await responses(self._llm, finals, self._settings.routed))
            finally:
                for task in waiting:
                    task.cancel()
                try:
                    if waiting:
                        await self._abandon(call, waiting.values())
                finally:
                    self._pauses.left(len(waiting))

    async def abort(self, call: str, indices: list[int]) -> None:
        """Stop sampling these requests of a call in flight; each is answered with the reason."""
        assert self._llm is not None, "start() comes first"
        with deaths_explained():
            await self._llm.abort([f"{call}.{index}" for index in indices])

    def take_counts(self) -> EngineCounts:
        """The engine's work since the last call."""
        return self._statistics.take()

    @phase("connect the refit")
    async def connect_weights(self, mode: RefitMode, rendezvous: dict[str, Any], first_receiver: int) -> None:
        """Connect every worker to the senders of the weights.

        Args:
            mode: transport of the weights.
            rendezvous: fields of refit.groups.Rendezvous; with files, `folder` and `session`.
            first_receiver: number of workers that the engines before this one have together.
        """
        await self._on_workers("connect_refit", mode, rendezvous, first_receiver)

    @phase("receive weights")
    async def receive_weights(self, version: int) -> None:
        """Take one version into every worker. From here until it is committed the engine refuses to generate.

        With `in_flight`, requests that come meanwhile wait for the commit, and those in flight are paused until then.
        """
        self._unusable = f"the weights are incomplete: the refit of version {version} was not committed"
        if self._settings.in_flight is not None:
            await self._pauses.hold()
        await self._on_workers("receive_refit", version)

    @phase("commit weights")
    async def commit_weights(self, version: int) -> None:
        """Serve what was received, under this version.

        Raises:
            EngineLostError: a process of the engine has ended: every worker is asked whether it is there.
        """
        llm = await self._pauses.paused()
        # All at once: each takes a turn of vLLM's processes, and nothing is served before all have answered.
        calls: list[Any] = [self._on_workers("confirm_refit", version)]
        calls.append(while_alive(llm, llm.update_weight_version(str(version))))
        if not self._settings.keeps_cache:
            calls.append(while_alive(llm, llm.reset_prefix_cache()))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)  # what fails leaves none of them under way
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if self._settings.keeps_cache:
            self._salt = str(version)
        self._unusable = None
        await self._pauses.release()

    @phase("sleep")
    async def sleep(self) -> None:
        """Give up the memory of the devices, and refuse to sample until all of it is back. Weights stay in host memory.

        vLLM's CPU build has nothing to give up; there the engine only refuses.
        """
        llm = await self._pauses.paused()
        self._asleep = True
        if self._settings.sleeps:
            # Level 1 forgets nothing but the cache; at 2 only parameters and buffers would come back.
            await while_alive(llm, llm.sleep(level=1))

    @phase("wake")
    async def wake(self, part: EngineMemory) -> None:
        """Take back a part of the memory of the devices: the weights first, then the cache, which is empty.

        An engine that is awake stays so.
        """
        if not self._asleep:
            return
        llm = await self._pauses.paused()
        if self._settings.sleeps:
            await while_alive(llm, llm.wake_up([part]))
        if part == "kv_cache":
            if self._settings.sleeps:  # its scheduler goes on once all memory is back
                self._pauses.pause()
            self._asleep = False

    def shutdown(self) -> None:
        """End the engine's processes."""
        if self._llm is not None:
            end_own(self._llm)
            self._llm = None

    async def _on_workers(self, method: str, *args: Any) -> None:
        """Call a method of refit.worker.RefitWorker on every worker; RuntimeError with all that went wrong."""
        llm = await self._pauses.paused()
        problems = await while_alive(llm, llm.collective_rpc(method, args=args))
        if any(problems):
            raise RuntimeError("; ".join(problem for problem in problems if problem))

    async def _add(
        self, call: str, requests: list[GenerationRequest], settings: SamplingSettings
    ) -> dict[asyncio.Task[RequestOutput], int]:
        """Give the scheduler all requests, in their order and before it runs, if it is idle; tasks of their outputs."""
        from vllm.inputs.engine import tokens_input

        assert self._llm is not None
        longest = self._settings.max_total_sequence_length
        prepared = [(one.prompt_ids.tolist(), sampling_params(one, settings, longest)) for one in requests]
        try:
            async with self._pauses.entering(len(requests)):
                queues = [
                    await self._llm.add_request(
                        f"{call}.{index}", tokens_input(prompt_ids, cache_salt=self._salt), parameters
                    )
                    for index, (prompt_ids, parameters) in enumerate(prepared)
                ]
        except BaseException:
            await self._abandon(call, range(len(requests)))
            raise
        return {asyncio.create_task(queue.get()): index for index, queue in enumerate(queues)}

    async def _abandon(self, call: str, indices: Iterable[int]) -> None:
        """Give up requests that nobody waits for any more: vLLM would sample them beside those that come later."""
        with suppress(EngineLostError):
            await self.abort(call, list(indices))

    async def _warm_up(self) -> None:
        """Sample a full batch, which allocates and compiles, so that the first real one does not.

        It has the structure of the real ones, so that vLLM says at the start what it cannot make of it.
        """
        config = self._settings.config
        settings = SamplingSettings(max_new_tokens=2, structured=config.structured)
        request = GenerationRequest(prompt_ids=np.zeros(2, dtype=np.int32), seed=0, max_new_tokens=2)
        async for _ in self.generate([request] * config.sequences_per_engine, settings, "warm-up"):
            pass
