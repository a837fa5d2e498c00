"""One vLLM engine inside a Ray actor: streams of responses to requests, and the receiving side of a refit."""

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

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationRequest, SamplingSettings
from megatron_grpo.cluster.actor_calls import Arguments, Method
from megatron_grpo.cluster.futures import wrap_for_pickling
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log, choose_library_level
from megatron_grpo.cluster.ray_cluster import list_assigned_gpus
from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.config.generation_schema import EngineMemory, RefitMode
from megatron_grpo.generation.engine_arguments import VllmSettings, engine_arguments
from megatron_grpo.generation.engine_canary import ARGUMENTS, CanaryPrompt
from megatron_grpo.generation.engine_interface import Engine, EngineWorker
from megatron_grpo.generation.engine_tokenizer import engine_tokenizer, require_same_tokenizer
from megatron_grpo.generation.pauses import Pauses
from megatron_grpo.generation.shutdown import EngineProcesses, end_own, own_processes
from megatron_grpo.generation.vllm_plugin import ENGINE_MARKER
from megatron_grpo.generation.vllm_requests import (
    EngineStatistics,
    chosen_experts,
    deaths_explained,
    in_bunches,
    responses,
    sampling_params,
    settings_in_use,
    while_alive,
    without_problems,
)
from megatron_grpo.models.source import require_folder
from megatron_grpo.platform.device import detect_platform, require_gpus
from megatron_grpo.platform.hooks import check_hooks

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


def prepare_processes(settings: VllmSettings, name: str) -> None:
    """Set vLLM's environment variables in this process, whose children inherit them; keep those that the user has set.

    `name` is the engine's name in logs and heartbeats.
    """
    os.environ[ENGINE_MARKER] = name
    os.environ["PYTHONSAFEPATH"] = "1"  # their first imports come before this process tells them its import path
    os.environ.setdefault("VLLM_LOGGING_LEVEL", choose_library_level())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")  # for the other workers when one has died
    if settings.config.engine.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if detect_platform().name == "cpu":
        from megatron_grpo.generation.cpu_engine import prepare_cpu_processes

        prepare_cpu_processes(settings)


class VllmEngine(Engine):
    """Ray actor with one vLLM engine. While no request is in flight, it is paused and its prefix cache is empty.

    So no batch depends on an earlier one, and the scheduler sees all requests of a call before it takes the first. Only
    with `VllmSettings.in_flight` may weights change while requests are in flight, and the cache outlast a pause.
    """

    _pauses: Pauses
    """Set by `start`."""

    def __init__(self, settings: VllmSettings) -> None:
        self._name = f"generation engine {settings.index}"
        begin_process_log(self._name)
        self._settings = settings
        self._llm: AsyncLLM | None = None
        self._tokenizer: Any = None
        """The run's tokenizer, from transformers; set by `start`."""
        self._unusable: str | None = None
        self._asleep = False
        self._statistics = EngineStatistics()
        self._salt: str | None = None
        """Cache salt that separates prompts cached under different weights; None: the cache never outlasts weights."""

    @phase("start")
    async def start(self) -> tuple[dict[str, float], EngineProcesses, dict[str, Any]]:
        """Start the processes, load the weights of the model folder and run one small batch.

        Returns:
            Seconds by part: "imports" (vLLM in this process), "processes" (starting the others and loading weights),
            "warm_up" (the batch). The engine's processes, which the driver ends if this actor no longer can. And the
            settings with which it computes (`requests.settings_in_use`).
        """
        times = [time.monotonic()]
        require_gpus(list_assigned_gpus())
        require_folder(self._settings.model_path)
        prepare_processes(self._settings, self._name)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        check_hooks(detect_platform().name)
        times.append(time.monotonic())
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**engine_arguments(self._settings)), stat_loggers=[self._statistics]
        )
        self._statistics.attach(self._llm)
        self._tokenizer = engine_tokenizer(self._settings.model_path)
        require_same_tokenizer(self._llm.get_tokenizer(), self._tokenizer)
        await self._llm.update_weight_version("0")  # the weights of the model folder
        if detect_platform().name == "cpu":
            from megatron_grpo.generation.cpu_engine import forget_sockets

            forget_sockets()
        self._pauses = Pauses(self._llm, keeps_cache=self._settings.keeps_cache, tell=self._statistics.in_flight)
        times.append(time.monotonic())
        await self._warm_up()
        self._statistics.take()
        # Objects made so far live until the end; each scan of them would take the garbage collector 0.3 s.
        gc.freeze()
        times.append(time.monotonic())
        parts = ("imports", "processes", "warm_up")
        seconds = {part: end - begin for part, (begin, end) in zip(parts, pairwise(times), strict=True)}
        return seconds, own_processes(), settings_in_use(self._llm.vllm_config)

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Any]:
        """Sample all requests, and yield responses as they become complete; called as a streaming generator of Ray.

        An idle engine gives bitwise equal responses to equal requests under equal weights: every request has its own
        seed, and the scheduler sees all of them, in order, before it takes the first. Calls that come while others are
        in flight are batched with them.

        Args:
            requests: prompt and seed of each response to sample.
            settings: temperature, filters and stop conditions of all requests.
            call: name of this call among those in flight, for `abort`.

        Yields:
            Pickled list[tuple[int, GenerationOutput | str]]: numbers of requests, each with its response, or with the
            reason why there is none.

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
                    yield wrap_for_pickling(await responses(self._llm, finals, self._settings.routed, self._tokenizer))
            finally:
                for task in waiting:
                    task.cancel()
                try:
                    if waiting:
                        await self._abandon(call, waiting.values())
                finally:
                    self._pauses.left(len(waiting))

    async def abort(self, call: str, indices: list[int]) -> None:
        """Stop sampling some requests of a call in flight; each is answered with the reason."""
        assert self._llm is not None, "start() comes first"
        with deaths_explained():
            await self._llm.abort([f"{call}.{index}" for index in indices])

    def take_counts(self) -> EngineCounts:
        """Take the counts of the engine's work since the last call."""
        return self._statistics.take()

    @phase("connect the refit")
    async def connect_weights(self, mode: RefitMode, rendezvous: dict[str, Any], first_receiver: int) -> None:
        """Connect every worker to the senders of the weights.

        Args:
            mode: transport of the weights.
            rendezvous: fields of refit.groups.Rendezvous; with files, `folder` and `session`.
            first_receiver: total number of workers of the engines before this one.
        """
        await self._call_workers(EngineWorker.connect_refit, mode, rendezvous, first_receiver)

    @phase("receive weights")
    async def receive_weights(self, version: int) -> None:
        """Receive one version in every worker. Until it is committed, the engine refuses to generate.

        With `in_flight`, new requests wait for the commit instead, and requests in flight are paused until then.
        """
        self._unusable = f"the weights are incomplete: the refit of version {version} was not committed"
        if self._settings.in_flight is not None:
            await self._pauses.hold()
        await self._call_workers(EngineWorker.receive_refit, version)

    @phase("commit weights")
    async def commit_weights(self, version: int, awaits_canary: bool = False) -> None:
        """Serve the received weights as this version, or if it `awaits_canary` only after `check_canary`.

        Raises:
            EngineLostError: a process of the engine has ended; every worker must confirm the version.
        """
        llm = await self._pauses.paused()
        # All calls at once, since each takes a round trip; nothing is served before all have answered.
        calls: list[Any] = [self._call_workers(EngineWorker.confirm_refit, version)]
        calls.append(while_alive(llm, llm.update_weight_version(str(version))))
        if not self._settings.keeps_cache:
            calls.append(while_alive(llm, llm.reset_prefix_cache()))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)  # wait for all, even if one fails
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if self._settings.keeps_cache:
            self._salt = str(version)
        if awaits_canary:
            self._unusable = f"version {version} of the weights has not passed the canary"
        else:
            await self._serve()

    @phase("canary")
    async def check_canary(self, prompt: CanaryPrompt) -> float:
        """Serve the committed weights if the engine's log-probabilities of the canary agree with the policy's.

        Requests in flight continue meanwhile, since the scheduler runs all or none. If the comparison fails, they are
        paused again, and the run ends without using their tokens.

        Returns:
            Median difference of the log-probabilities in the worst sequence, in nats.

        Raises:
            CanaryError: the log-probabilities differ; the engine does not serve.
        """
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        llm = await self._pauses.paused()
        with deaths_explained():
            queues = [
                await llm.add_request(
                    f"canary.{number}",
                    tokens_input(list(tokens), cache_salt="canary"),
                    SamplingParams(**ARGUMENTS, output_kind=RequestOutputKind.FINAL_ONLY),
                )
                for number, tokens in enumerate(prompt.sequences)
            ]
            async with self._pauses.lifted():  # only now the scheduler runs, so that it sees all of them
                finals = await asyncio.gather(*(queue.get() for queue in queues))
                if self._settings.routed is not None:  # recorded for every request, and kept until it is taken
                    await while_alive(llm, chosen_experts(llm, finals, self._settings.routed))
                logprobs = [
                    [one[token].logprob for token, one in zip(tokens[1:], final.prompt_logprobs[1:], strict=True)]
                    for tokens, final in zip(prompt.sequences, finals, strict=True)
                ]
                error = prompt.require(logprobs)
        await self._serve()
        return error

    @phase("fingerprint weights")
    async def fingerprint_weights(self) -> list[dict[str, list[float]]]:
        """Fingerprints of every worker's weights (`refit.fingerprints.engine_fingerprints`), by worker."""
        return await self._call_workers(EngineWorker.fingerprint_weights)

    @phase("sleep")
    async def sleep(self) -> None:
        """Free device memory, and refuse to sample until all of it is back. Weights stay in host memory.

        With vLLM's CPU build the engine only refuses to sample.
        """
        llm = await self._pauses.paused()
        self._asleep = True
        if self._settings.sleeps:
            # Level 1 loses only the cache; after level 2 only parameters and buffers would come back.
            await while_alive(llm, llm.sleep(level=1))

    @phase("wake")
    async def wake(self, part: EngineMemory) -> None:
        """Take back a part of the device memory: first the weights, then the cache, which is empty.

        Does nothing if the engine is awake.
        """
        if not self._asleep:
            return
        llm = await self._pauses.paused()
        if self._settings.sleeps:
            await while_alive(llm, llm.wake_up([part]))
        if part == "kv_cache":
            if self._settings.sleeps:  # waking resumes the scheduler
                self._pauses.pause()
            self._asleep = False

    def shutdown(self) -> None:
        """End the engine's processes."""
        if self._llm is not None:
            end_own(self._llm)
            self._llm = None

    async def _call_workers(self, method: Method[Arguments], *args: Arguments.args, **_: Arguments.kwargs) -> list[Any]:
        """Call a method on every worker; RuntimeError with the problems of all workers."""
        llm = await self._pauses.paused()
        answers = await while_alive(llm, llm.collective_rpc(method.__name__, args=args))
        return without_problems(answers)

    async def _serve(self) -> None:
        """Let requests in."""
        self._unusable = None
        await self._pauses.release()

    async def _add(
        self, call: str, requests: list[GenerationRequest], settings: SamplingSettings
    ) -> dict[asyncio.Task[RequestOutput], int]:
        """Add all requests in order, before an idle scheduler runs; returns tasks for their outputs."""
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
        """Abort requests whose caller is gone, which vLLM would otherwise continue to sample."""
        with suppress(EngineLostError):
            await self.abort(call, list(indices))

    async def _warm_up(self) -> None:
        """Sample a full batch, so that memory is allocated and kernels are compiled before the first real batch.

        It uses the configured structured output, so that vLLM reports problems with it at the start.
        """
        config = self._settings.config
        settings = SamplingSettings(max_new_tokens=2, structured=config.structured)
        request = GenerationRequest(prompt_ids=np.zeros(2, dtype=np.int32), seed=0, max_new_tokens=2)
        async for _ in self.generate([request] * config.sequences_per_engine, settings, "warm-up"):
            pass
