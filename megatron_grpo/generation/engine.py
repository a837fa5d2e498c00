"""One vLLM engine inside a Ray actor: streams of responses to requests, and the receiving side of a refit."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationRequest, SamplingSettings
from megatron_grpo.cluster.actor_calls import Arguments, Method
from megatron_grpo.cluster.actor_processes import list_own_processes
from megatron_grpo.cluster.allocators import choose_pinned_settings
from megatron_grpo.cluster.futures import wrap_for_pickling
from megatron_grpo.cluster.machines import prepare_network
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log, choose_library_level
from megatron_grpo.cluster.ray_cluster import find_node_address, list_assigned_gpus
from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.config.generation_schema import EngineMemory, RefitMode
from megatron_grpo.generation import vllm_requests
from megatron_grpo.generation.engine_arguments import VllmSettings, make_engine_arguments, needs_machines
from megatron_grpo.generation.engine_canary import SAMPLING_ARGUMENTS, CanaryPrompt, CanaryResult
from megatron_grpo.generation.engine_interface import Engine, EngineStart, EngineWorker, LoaderTrace, TensorShapes
from megatron_grpo.generation.engine_processes import await_alive, death_as_engine_loss, end_child_processes
from megatron_grpo.generation.engine_statistics import EngineStatistics
from megatron_grpo.generation.gate import Gate
from megatron_grpo.generation.vllm_images import ImagePrompts
from megatron_grpo.generation.vllm_plugin import (
    ENGINE_MARKER,
    load_engine_tokenizer,
    require_same_tokenizer,
    wake_paused,
)
from megatron_grpo.models.source import require_folder
from megatron_grpo.platform.device import detect_platform, require_gpus
from megatron_grpo.platform.hooks import check_hooks

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)


def prepare_processes(settings: VllmSettings, name: str) -> None:
    """Set vLLM's environment variables where the user has not."""
    os.environ[ENGINE_MARKER] = name
    os.environ["PYTHONSAFEPATH"] = "1"  # child processes import modules before they get this process's import path
    os.environ.setdefault("VLLM_LOGGING_LEVEL", choose_library_level())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")  # of the other workers when one has died
    if settings.config.engine.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if detect_platform().name == "cpu":
        from megatron_grpo.generation.cpu_engine import prepare_cpu_processes

        prepare_cpu_processes(settings)
    else:
        _prepare_gpu_processes(settings)


def _prepare_gpu_processes(settings: VllmSettings) -> None:
    prepare_network(find_node_address())
    # NCCL reads both when a process makes its first communicator. Ranks of the policy have the first one too, so that
    # both ends of a refit make their buffers alike. The second one turns multicast off, which fails to start in engines
    # over several machines ("transport/nvls.cc ... invalid argument").
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "1")
    if needs_machines(settings.config):
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if settings.sleeps and choose_pinned_settings():
        # Weights of sleeping engines are in pinned memory, up to twice as much if rounded to powers of two.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", choose_pinned_settings())
    _choose_fp8_scales()


def _choose_fp8_scales() -> None:
    """Keep the float32 scales of FP8 blocks on Hopper.

    vLLM would round scales up to powers of two there too, and weights a second time, where it multiplies by DeepGEMM.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()  # asks NVML, which needs no context on the GPU
    if capability is not None and capability.major == 9:
        os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")


class VllmEngine(Engine):
    """Ray actor with one vLLM engine.

    While it has no requests, it is paused, and its prefix cache is empty, so no batch depends on an earlier one. Only
    with `VllmSettings.in_flight` may weights change and the engine sleep while requests are in flight, and the cache
    outlast a pause.
    """

    _gate: Gate  # set by `start`

    def __init__(self, settings: VllmSettings) -> None:
        self._name = f"generation engine {settings.index}"
        begin_process_log(self._name)
        self._settings = settings
        self._llm: AsyncLLM | None = None
        self._tokenizer: Any = None  # the run's, from transformers; set by `start`
        self._statistics = EngineStatistics()
        # Separates prompts that are cached under different weights; None: the cache never outlasts weights.
        self._cache_salt: str | None = None
        self._connections = 0  # to a policy, which trains a version again after a restart
        self._adapter: LoRARequest | None = None  # of all requests, once a refit has put it into its slot

    @phase("start")
    async def start(self) -> EngineStart:
        times = [time.monotonic()]
        require_gpus(list_assigned_gpus())
        require_folder(self._settings.model_path)
        prepare_processes(self._settings, self._name)
        gc.disable()  # a fifth of the time of vLLM's imports
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        check_hooks(detect_platform().name)
        times.append(time.monotonic())
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**make_engine_arguments(self._settings)), stat_loggers=[self._statistics]
        )
        self._statistics.attach(self._llm, has_prometheus=self._settings.has_prometheus)
        self._tokenizer = load_engine_tokenizer(self._settings.model_path)
        require_same_tokenizer(self._llm.get_tokenizer(), self._tokenizer)
        await self._llm.update_weight_version("0")  # the weights of the model folder
        if detect_platform().name == "cpu":
            from megatron_grpo.generation.cpu_engine import remove_sockets

            remove_sockets()
        self._gate = Gate(
            self._llm,
            updates_in_flight=self._settings.in_flight is not None,
            keeps_cache=self._settings.keeps_cache,
            on_change=self._statistics.set_in_flight,
        )
        times.append(time.monotonic())
        # A full batch allocates memory and compiles kernels; with the configured structured output, vLLM reports
        # problems with it at the start.
        sampling = SamplingSettings(max_new_tokens=2, structured=self._settings.config.structured)
        request = GenerationRequest(prompt_ids=np.zeros(2, dtype=np.int32), seed=0, max_new_tokens=2)
        async for _ in self.generate([request] * self._settings.config.sequences_per_engine, sampling, "warm-up"):
            pass
        self._statistics.take()  # the warm-up is not part of the first step's counts
        if self._settings.awaits_refit:
            await self._gate.close("weights", "no version of the weights has come yet")
        # Objects made so far live until the end; each scan of them would take the garbage collector 0.3 s.
        gc.freeze()
        gc.enable()
        times.append(time.monotonic())
        parts = ("imports", "processes", "warm_up")  # vLLM in this process; starting the others and loading; the batch
        seconds = {part: end - begin for part, (begin, end) in zip(parts, pairwise(times), strict=True)}
        return EngineStart(seconds, list_own_processes(), vllm_requests.describe_settings(self._llm.vllm_config))

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Any]:
        assert self._llm is not None, "start() comes first"
        self._gate.require_open()
        pending: dict[asyncio.Task[RequestOutput], int] = {}
        with phase("generate"), death_as_engine_loss():
            try:
                pending = await self._add(call, requests, settings)
                async for tasks in vllm_requests.iterate_finished(pending):
                    self._gate.leave(len(tasks))
                    outputs = {index: task.result() for index, task in tasks.items()}
                    self._statistics.count_tokens(sum(len(output.outputs[0].token_ids) for output in outputs.values()))
                    yield wrap_for_pickling(
                        vllm_requests.make_responses(outputs, self._settings.routed, self._tokenizer)
                    )
            finally:
                # If the caller is gone, vLLM must forget the requests before the gate may pause it.
                for task in pending:
                    task.cancel()
                try:
                    if pending:
                        await self._abandon(call, pending.values())
                finally:
                    self._gate.leave(len(pending))

    async def abort(self, call: str, indices: list[int]) -> None:
        assert self._llm is not None, "start() comes first"
        with death_as_engine_loss():
            await self._llm.abort([f"{call}.{index}" for index in indices])

    def take_counts(self) -> EngineCounts:
        return self._statistics.take()

    @phase("trace loaders")
    async def trace_weights(self, mode: RefitMode, tensors: TensorShapes, needs_boxes: bool) -> list[LoaderTrace]:
        return await self._call_workers(EngineWorker.trace_weights, mode, tensors, needs_boxes)

    @phase("connect the refit")
    async def connect_weights(self, mode: RefitMode, source: dict[str, Any], first_receiver: int) -> None:
        self._connections += 1
        await self._call_workers(EngineWorker.connect_refit, mode, source, first_receiver)

    @phase("receive weights")
    async def receive_weights(self, version: int) -> None:
        await self._gate.close(
            "weights", f"the weights are incomplete: the refit of version {version} was not committed"
        )
        await self._call_workers(EngineWorker.receive_refit, version)

    @phase("commit weights")
    async def commit_weights(self, version: int, awaits_canary: bool = False) -> None:
        llm = await self._gate.wait_paused()
        # All calls at once, since each takes a round trip; nothing is served before all have answered.
        calls: list[Any] = [self._call_workers(EngineWorker.confirm_refit, version)]
        calls.append(await_alive(llm, llm.update_weight_version(str(version))))
        if not self._settings.keeps_cache:
            calls.append(await_alive(llm, llm.reset_prefix_cache()))
        if self._settings.images is not None and self._settings.images.is_tower_trained:
            calls.append(await_alive(llm, llm.reset_encoder_cache()))  # features of images
        outcomes = await asyncio.gather(*calls, return_exceptions=True)  # waits for all, even if one fails
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        self._adapter = vllm_requests.make_adapter_request(self._settings.adapter)
        if self._settings.keeps_cache:
            self._cache_salt = f"{version}.{self._connections}"
        if awaits_canary:
            await self._gate.close("weights", f"version {version} of the weights has not passed the canary")
        else:
            await self._gate.open("weights")

    @phase("canary")
    async def check_canary(self, prompt: CanaryPrompt) -> CanaryResult:
        llm = await self._gate.wait_paused()
        result = CanaryResult(math.nan)
        with death_as_engine_loss():
            try:
                logprobs = await self._compute_canary(llm, prompt)
            except (LookupError, TypeError, ValueError) as failure:
                text = f"vLLM did not compute the canary, so version {prompt.version} was not compared"
                logger.warning("%s: %s: %s", text, type(failure).__name__, failure)
                names = [f"canary.{number}" for number in range(len(prompt.sequences))]
                await await_alive(llm, llm.abort(names))
            else:
                result = prompt.require_agreement(logprobs)
        await self._gate.open("weights")
        return result

    async def _compute_canary(self, llm: AsyncLLM, prompt: CanaryPrompt) -> list[list[float]]:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        queues = [
            await llm.add_request(
                f"canary.{number}",
                tokens_input(list(tokens), cache_salt="canary"),
                SamplingParams(**SAMPLING_ARGUMENTS, output_kind=RequestOutputKind.FINAL_ONLY),
                lora_request=self._adapter,
            )
            for number, tokens in enumerate(prompt.sequences)
        ]
        # The scheduler runs only from here on, so that it sees the full canary at once. Requests in flight continue
        # too, since the scheduler runs all or none; if the comparison fails, the run ends without their tokens.
        async with self._gate.running_scheduler():
            outputs = await asyncio.gather(*(queue.get() for queue in queues))
            return [
                [
                    candidates[token].logprob
                    for token, candidates in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
                ]
                for tokens, output in zip(prompt.sequences, outputs, strict=True)
            ]

    @phase("fingerprint weights")
    async def fingerprint_weights(self) -> list[dict[str, list[float]]]:
        return await self._call_workers(EngineWorker.fingerprint_weights)

    @phase("sleep")
    async def sleep(self, keep_weights: bool = True) -> None:
        """Free device memory, and keep requests out; with vLLM's CPU build it frees nothing.

        Without `keep_weights` the engine needs a refit before it samples again. An engine with a slot for an adapter
        always keeps the base model.
        """
        if self._settings.in_flight is None:
            await self._gate.wait_paused()  # or stay awake
        await self._gate.close("memory", "the engine sleeps while models train on its devices")
        llm = await self._gate.wait_paused()
        self._statistics.set_in_flight(0)  # a sleeping engine is not busy
        if not self._settings.sleeps:
            return
        # Level 1 copies all weights to host memory, which vLLM pins for it, and unpins when the engine wakes: seconds
        # for a large model. Level 2 gives them up, but for buffers and what the workers keep. vLLM computes the cache
        # of requests in flight again.
        level = 1 if keep_weights or not self._settings.awaits_refit else 2
        if level == 2:
            await self._gate.close("weights", "the engine has given its weights up, and no refit has brought others")
            await self._call_workers(EngineWorker.keep_unsent)
        await await_alive(llm, llm.sleep(level=level, mode="keep"))

    @phase("wake")
    async def wake(self, part: EngineMemory) -> None:
        """Take back memory: first for weights, then for the cache."""
        if not self._gate.is_closed("memory"):
            return
        llm = await self._gate.wait_paused()
        if self._settings.sleeps:
            # `vllm_plugin.wake_paused`: after vLLM's own call, responses in flight would go on before the canary.
            await await_alive(llm, llm.engine_core.call_utility_async(wake_paused.__name__, [part]))
        if part == "kv_cache":
            await self._gate.open("memory")
            self._statistics.set_in_flight(self._gate.in_flight)

    def shutdown(self) -> None:
        if self._llm is not None:
            end_child_processes(self._llm)
            self._llm = None

    async def _call_workers(self, method: Method[Arguments], *args: Arguments.args, **_: Arguments.kwargs) -> list[Any]:
        llm = await self._gate.wait_paused()
        return vllm_requests.require_answers(await await_alive(llm, llm.collective_rpc(method.__name__, args=args)))

    async def _add(
        self, call: str, requests: list[GenerationRequest], settings: SamplingSettings
    ) -> dict[asyncio.Task[RequestOutput], int]:
        from vllm.inputs.engine import tokens_input

        assert self._llm is not None
        max_length = self._settings.max_total_sequence_length
        images = self._settings.images
        prompts = None if images is None else ImagePrompts(self._llm, images)
        prepared: list[tuple[Any, SamplingParams]] = []
        for request in requests:
            parameters = vllm_requests.make_sampling_params(request, settings, max_length)
            content: Any = tokens_input(request.prompt_ids.tolist())
            if images is not None:
                parameters.logit_bias = images.make_logit_bias()
            if prompts is not None and request.images:
                content = await prompts.process(request)
            if self._cache_salt is not None:
                content["cache_salt"] = self._cache_salt
            prepared.append((content, parameters))
        # An idle engine gives bitwise equal responses to equal requests under equal weights: every request has its own
        # seed, and the scheduler sees all of them, in order, before it takes the first.
        try:
            async with self._gate.admission(len(requests)):
                queues = [
                    await self._llm.add_request(
                        f"{call}.{index}",
                        content,
                        parameters,
                        lora_request=self._adapter,
                    )
                    for index, (content, parameters) in enumerate(prepared)
                ]
        except BaseException:
            await self._abandon(call, range(len(requests)))
            raise
        return {asyncio.create_task(queue.get()): index for index, queue in enumerate(queues)}

    async def _abandon(self, call: str, indices: Iterable[int]) -> None:
        with suppress(EngineLostError):
            await self.abort(call, list(indices))
