"""One vLLM engine inside a Ray actor: a stream of responses to many requests, and its half of a refit."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log, level_of_libraries
from megatron_grpo.cluster.signals import kill_stopped
from megatron_grpo.config.schema import AsyncGRPOConfig, GenerationConfig
from megatron_grpo.data.packed import Packed
from megatron_grpo.data.responses import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.data.trajectory import Span
from megatron_grpo.generation.routed_experts import chosen_experts, recording_arguments
from megatron_grpo.generation.shared_memory import free, queue_segments
from megatron_grpo.generation.vllm_fork import forget_socket, start_importing
from megatron_grpo.generation.vllm_plugin import ENGINE_MARKER, WEIGHT_TRANSFER_BACKEND
from megatron_grpo.models.routed import RoutedForm
from megatron_grpo.platform.device import current_platform

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

Result = TypeVar("Result")

CPU_BATCH_TOKENS = 4096
"""Most tokens of one forward pass of a CPU engine; more when a single sequence may be longer."""

FIRST_VERSION = 0
"""Version of the weights that the engine reads from the model folder."""

PACE_S = 0.02
"""Responses that come within this time of each other leave together: few large messages instead of many small ones."""

DEATH_CHECK_S = 1.0
"""Seconds between two looks at whether vLLM's processes are still there, while they are waited for."""

GRACE_S = 5.0
"""Time for vLLM's processes to end by themselves: those that are killed leave their shared memory behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Everything one engine is built from; plain values, so that it travels to the actor."""

    index: int
    model_path: str
    config: GenerationConfig
    precision: str
    max_total_sequence_length: int
    routed: RoutedForm | None = None
    """What the experts look like that responses come with; None: they come without."""
    in_flight: AsyncGRPOConfig | None = None
    """What happens to the cache when weights change under responses; None: they never do."""

    @property
    def keeps_cache(self) -> bool:
        """Whether responses go on from the cache of the old weights when new ones come."""
        return self.in_flight is not None and not self.in_flight.recompute_kv_cache_after_weight_updates


class VllmEngine:
    """Ray actor. While nothing is in flight, generation is paused and its prefix cache empty.

    So no batch depends on an earlier one, and the scheduler sees all requests of a call before it takes the first. Only
    with `VllmSettings.in_flight` may weights change while something is in flight, and a cache outlast a pause.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._name = f"generation engine {settings.index}"
        begin_process_log(self._name)
        self._settings = settings
        self._llm: AsyncLLM | None = None
        self._parking: asyncio.Task[None] | None = None
        """Pausing, or paused when done; None: responses are in flight."""
        self._unusable: str | None = None
        self._in_flight = 0
        self._entry = asyncio.Lock()
        self._open = asyncio.Event()
        """Whether requests may enter; not while weights change under those in flight."""
        self._open.set()
        self._salt: str | None = None
        """What separates prompts that are cached under different weights, where a cache outlasts them."""

    @phase("start")
    async def start(self) -> dict[str, float]:
        """Start the processes, load the weights of the model folder and run one small batch.

        Returns:
            Seconds by part: "imports" of vLLM in this process; "processes": starting the others and loading weights;
            "warm_up": the batch.
        """
        times = [time.monotonic()]
        os.environ[ENGINE_MARKER] = self._name
        os.environ.setdefault("VLLM_LOGGING_LEVEL", level_of_libraries())
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")  # of the others, when one has died
        if current_platform().name == "cpu":
            _prepare_cpu_processes(self._settings)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        times.append(time.monotonic())
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self._settings)))
        forget_socket()
        await self._llm.update_weight_version(str(FIRST_VERSION))
        self._parking = asyncio.create_task(self._park())
        times.append(time.monotonic())
        await self._warm_up()
        # Nothing made so far is garbage; looking through all of it every few seconds costs a third of a second.
        gc.freeze()
        times.append(time.monotonic())
        parts = ("imports", "processes", "warm_up")
        return {part: end - begin for part, (begin, end) in zip(parts, pairwise(times), strict=True)}

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Packed]:
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
            RuntimeError: the engine cannot sample; the message says why.
        """
        if self._unusable is not None and self._settings.in_flight is None:
            raise RuntimeError(self._unusable)
        waiting: dict[int, RequestOutputCollector] = {}
        arrivals = _Arrivals(len(requests))
        with phase("generate"), _deaths_explained():
            try:
                waiting = await self._add(call, requests, settings)
                for queue in waiting.values():
                    queue.ready = arrivals  # one place to wait for all of them
                    if queue.output is not None:
                        arrivals.set()
                while waiting:
                    await arrivals.some()
                    finals = _drain(waiting)
                    self._left(len(finals))
                    yield Packed(self._outputs(finals, await self._routed(finals)))
            finally:
                self._left(len(waiting))

    async def abort(self, call: str, indices: list[int]) -> None:
        """Stop sampling these requests of a call in flight; they count as answered, with the reason."""
        assert self._llm is not None, "start() comes first"
        with _deaths_explained():
            await self._llm.abort([f"{call}.{index}" for index in indices])

    @phase("connect the refit")
    async def connect_weights(self, rendezvous: dict[str, Any], first_receiver: int) -> None:
        """Join every worker to the refit's groups.

        Args:
            rendezvous: fields of refit.broadcast.channel.Rendezvous, by name.
            first_receiver: number of workers that the engines before this one have together.
        """
        await self._on_workers("connect_refit", rendezvous, first_receiver)

    @phase("receive weights")
    async def receive_weights(self, version: int) -> None:
        """Take one version into every worker. From here until it is committed the engine refuses to generate.

        With `in_flight`, requests that come meanwhile wait for the commit, and those in flight are paused until then.
        """
        self._unusable = f"the weights are incomplete: the refit of version {version} was not committed"
        if self._settings.in_flight is not None:
            await self._pause_in_flight()
        await self._on_workers("receive_refit", version)

    @phase("commit weights")
    async def commit_weights(self, version: int) -> None:
        """Serve what was received, under this version."""
        llm = await self._parked()
        with _deaths_explained():
            await _while_alive(llm, llm.update_weight_version(str(version)))
            if self._settings.keeps_cache:
                self._salt = str(version)
            else:
                await _while_alive(llm, llm.reset_prefix_cache())
            self._unusable = None
            if self._in_flight:
                self._parking = None
                await _while_alive(llm, llm.resume_generation())
        self._open.set()

    def shutdown(self) -> None:
        """End the engine's processes."""
        if self._llm is not None:
            own = psutil.Process()
            children = own.children(recursive=True)
            segments = set().union(*(queue_segments(process) for process in [own, *children]))
            self._llm.shutdown(timeout=GRACE_S)
            kill_stopped(children)
            self._llm = None
            free(segments)

    async def _on_workers(self, method: str, *args: Any) -> None:
        """Call a method of refit.receiver.RefitWorker on every worker; RuntimeError with all that went wrong."""
        llm = await self._parked()
        with _deaths_explained():
            problems = await _while_alive(llm, llm.collective_rpc(method, args=args))
        if any(problems):
            raise RuntimeError("; ".join(problem for problem in problems if problem))

    async def _add(
        self, call: str, requests: list[GenerationRequest], settings: SamplingSettings
    ) -> dict[int, RequestOutputCollector]:
        """Give the scheduler all requests, in their order and before it runs, if it is idle."""
        from vllm.inputs.engine import tokens_input

        assert self._llm is not None, "start() comes first"
        prepared = [
            (f"{call}.{index}", request.prompt_ids.tolist(), self._sampling_params(request, settings))
            for index, request in enumerate(requests)
        ]
        async with self._entering():
            self._in_flight += len(requests)  # from here on nobody parks
            try:
                if self._parking is not None:
                    await self._parking
                queues = {
                    index: await self._llm.add_request(
                        name, tokens_input(prompt_ids, cache_salt=self._salt), parameters
                    )
                    for index, (name, prompt_ids, parameters) in enumerate(prepared)
                }
                if self._parking is not None:
                    self._parking = None
                    await _while_alive(self._llm, self._llm.resume_generation())
            except BaseException:
                self._in_flight -= len(requests)
                raise
        return queues

    @asynccontextmanager
    async def _entering(self) -> AsyncIterator[None]:
        """Hold the entry, at a moment at which no weights change."""
        while True:
            await self._open.wait()
            async with self._entry:
                if self._open.is_set():  # it may have been closed while others were entering
                    yield
                    return

    async def _pause_in_flight(self) -> None:
        """Let nobody enter until the next commit, and pause what is in flight."""
        self._open.clear()
        async with self._entry:  # who is entering is in flight first
            if self._parking is None:
                self._parking = asyncio.create_task(self._park())

    def _left(self, count: int) -> None:
        """So many requests are no longer in flight; the last one leaves a paused engine behind."""
        self._in_flight -= count
        if count and not self._in_flight and self._parking is None:
            self._parking = asyncio.create_task(self._park())

    async def _routed(self, finals: dict[int, RequestOutput]) -> dict[int, NDArray[Any]]:
        """By request, [prompt and response tokens but the last, numbers of a token]; empty when nobody asks."""
        form = self._settings.routed
        if form is None:
            return {}
        assert self._llm is not None
        found = await _while_alive(self._llm, chosen_experts(self._llm, list(finals.values()), form))
        return dict(zip(finals, found, strict=True))

    def _outputs(
        self, finals: dict[int, RequestOutput], routed: dict[int, NDArray[Any]]
    ) -> list[tuple[int, GenerationOutput | str]]:
        assert self._llm is not None
        token_ids = [final.outputs[0].token_ids for final in finals.values()]
        texts = self._llm.get_tokenizer().batch_decode(token_ids, skip_special_tokens=True)
        return [
            (index, _output(final, text, routed.get(index)))
            for (index, final), text in zip(finals.items(), texts, strict=True)
        ]

    def _sampling_params(self, request: GenerationRequest, settings: SamplingSettings) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self._settings.max_total_sequence_length - len(request.prompt_ids)
        max_tokens = min(request.max_new_tokens, settings.max_new_tokens, room)
        if max_tokens < 1:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a response within "
                f"policy.max_total_sequence_length={self._settings.max_total_sequence_length}"
            )
        return SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k or 0,
            seed=request.seed,
            max_tokens=max_tokens,
            stop=list(settings.stop_strings),
            stop_token_ids=list(settings.stop_token_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(settings.stop_strings),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    async def _parked(self) -> AsyncLLM:
        if self._parking is None:
            raise RuntimeError(f"{self._in_flight} responses are in flight: the weights cannot change under them")
        await self._parking
        assert self._llm is not None, "start() comes first"
        return self._llm

    async def _park(self) -> None:
        assert self._llm is not None
        with _deaths_explained():
            clear_cache = not self._settings.keeps_cache
            await _while_alive(self._llm, self._llm.pause_generation(mode="keep", clear_cache=clear_cache))

    async def _warm_up(self) -> None:
        # The first batch allocates and compiles; a full one, so that the first real one does not.
        request = GenerationRequest(prompt_ids=np.zeros(2, dtype=np.int32), seed=0, max_new_tokens=2)
        batch = [request] * self._settings.config.engine.max_num_seqs
        async for _ in self.generate(batch, SamplingSettings(max_new_tokens=2), "warm-up"):
            pass


async def _while_alive(llm: AsyncLLM, call: Coroutine[Any, Any, Result]) -> Result:
    """The result of a call of vLLM's processes, which vLLM itself awaits forever when they end under it."""
    from vllm.v1.engine.exceptions import EngineDeadError

    task = asyncio.create_task(call)
    while not (await asyncio.wait({task}, timeout=DEATH_CHECK_S))[0]:
        if llm.errored:
            task.cancel()
            raise EngineDeadError
    return task.result()


@contextmanager
def _deaths_explained() -> Iterator[None]:
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError:
        raise RuntimeError("a vLLM process of this engine has ended") from None
    except (RuntimeError, ValueError):
        raise
    except Exception as error:  # noqa: BLE001 - a call that a process ends under raises just that
        raise RuntimeError(f"a vLLM process of this engine failed: {error}") from None


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """vLLM's arguments for this engine."""
    config = settings.config
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": config.engine.dtype or settings.precision,
        "tensor_parallel_size": config.parallel.tensor,
        "pipeline_parallel_size": config.parallel.pipeline,
        "enable_expert_parallel": config.parallel.expert > 1,
        "max_model_len": settings.max_total_sequence_length,
        "max_num_seqs": config.engine.max_num_seqs,
        "enforce_eager": config.engine.enforce_eager,
        "enable_prefix_caching": config.engine.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER_BACKEND},
        "worker_extension_cls": "megatron_grpo.refit.broadcast.receiver.RefitWorker",
    }
    if settings.routed is not None:
        arguments |= recording_arguments()
    if current_platform().name == "cpu":
        return arguments | _cpu_arguments(settings)
    return arguments | _cuda_arguments(settings)


def _prepare_cpu_processes(settings: VllmSettings) -> None:
    """Bind the workers to cores, and begin to import vLLM for them; before this process imports it."""
    ranks = settings.config.parallel.ranks_per_engine
    cores = cores_of_ranks(
        sorted(os.sched_getaffinity(0)),
        first=settings.index * ranks,
        ranks=ranks,
        total=settings.config.parallel.data * ranks,
    )
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
    if settings.config.engine.enforce_eager:
        # vLLM compiles how it counts a token's rank among the others all the same: seconds, for a number nobody reads.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    start_importing(threads=len(cores.split("|")[0].split(",")))


def _cpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    return {
        "distributed_executor_backend": "mp",
        # A prompt that is prefilled in two parts makes vLLM rewind the request's generator, which torch cannot on CPU.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_BATCH_TOKENS, settings.max_total_sequence_length),
        "kv_cache_memory_bytes": int(settings.config.engine.kv_cache_gib * 2**30),
        "worker_cls": "megatron_grpo.generation.vllm_cpu_worker.PipelineCPUWorker",
    }


def _cuda_arguments(settings: VllmSettings) -> dict[str, Any]:
    import ray

    # An engine within a node owns its GPUs through this actor; a larger one has a placement group of its own.
    fits = len(ray.get_gpu_ids()) >= settings.config.parallel.ranks_per_engine
    return {
        "distributed_executor_backend": "mp" if fits else "ray",
        "gpu_memory_utilization": settings.config.engine.gpu_memory_utilization,
    }


def cores_of_ranks(cores: list[int], *, first: int, ranks: int, total: int) -> str:
    """vLLM's thread binding for ranks [first, first + ranks) when `total` ranks share the cores evenly.

    Returns:
        One comma-separated core list per rank, joined by "|"; a rank without a core of its own shares one.
    """
    if total > len(cores):
        return "|".join(str(cores[rank % len(cores)]) for rank in range(first, first + ranks))
    share = len(cores) // total
    return "|".join(
        ",".join(str(core) for core in cores[rank * share : (rank + 1) * share]) for rank in range(first, first + ranks)
    )


class _Arrivals:
    """Stands in for the events of many of vLLM's queues, each of which gets one output: counts those that have."""

    def __init__(self, expected: int) -> None:
        self._left = expected
        self._some, self._all = asyncio.Event(), asyncio.Event()

    def set(self) -> None:
        """A queue has got its output."""
        self._left -= 1
        self._some.set()
        if not self._left:
            self._all.set()

    def clear(self) -> None:
        """A queue was emptied."""

    async def some(self) -> None:
        """Return when something has arrived: then after PACE_S, or as soon as it is everything."""
        await self._some.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(PACE_S):
                await self._all.wait()
        self._some.clear()


def _drain(waiting: dict[int, RequestOutputCollector]) -> dict[int, RequestOutput]:
    """Take what has arrived out of the queues, and out of those that are waited for."""
    finals = {index: output for index, queue in waiting.items() if (output := queue.get_nowait()) is not None}
    for index in finals:
        del waiting[index]
    return finals


def _output(final: RequestOutput, text: str, routed: NDArray[Any] | None) -> GenerationOutput | str:
    """A response, or why there is none; `routed`: [tokens, numbers of a token], the experts that it comes with."""
    completion = final.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        return f"vLLM ended a request early: {completion.finish_reason}"
    logprobs = completion.logprobs.logprobs
    spans = completion.weight_versions or []
    assert len(logprobs) == len(completion.token_ids), "one log-probability per sampled token"
    assert spans, "every token has a version"
    return GenerationOutput(
        token_ids=np.array(completion.token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=text,
        stop_reason=completion.finish_reason,
        spans=[Span(span.start, span.end, int(span.version)) for span in spans],
        routed=routed,
    )
