"""A vLLM server that runs elsewhere, behind an actor with the methods of `VllmEngine`."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import aiohttp
import numpy as np

from megatron_grpo.cluster.futures import pickled
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.data.responses import EngineCounts, GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.data.trajectory import Span
from megatron_grpo.sampler.arguments import VllmSettings
from megatron_grpo.sampler.requests import EngineStatistics, in_bunches, sampling_arguments
from megatron_grpo.sampler.shutdown import EngineProcesses, own_processes
from megatron_grpo.weights.families import shape_of_folder

CONNECT_S = 10.0
PROBE_S = 1.0
"""Seconds between two looks for a server that does not answer."""
NO_NUMBER = -9999.0
"""What the server writes in the place of a log-probability that is NaN."""

logger = logging.getLogger(__name__)


class ServerGoneError(RuntimeError):
    """The connection could not be made, or ended before the answer."""


class ServerClient:
    """One server. To be made inside an event loop.

    Args:
        url: "http://HOST:PORT".
        bearer: token that the server requires; None: it requires none.
    """

    def __init__(self, url: str, bearer: str | None) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # vLLM's scheduler decides what waits
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers={} if bearer is None else {"Authorization": f"Bearer {bearer}"},
        )

    async def post(self, path: str, body: Any = None, **query: str) -> Any:
        """The answer to a POST, as JSON.

        Raises:
            ServerGoneError: the server went away, or is not there.
            RuntimeError: the server refuses; its answer is in the message.
        """
        return await self.ask("POST", path, json={} if body is None else body, params=query)

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of every worker of the server to a method of refit.worker.RefitWorker; raises as `post` does."""
        answer = await self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        return list(answer["results"])

    async def wait_until_up(self, timeout_s: float) -> None:
        """Return when the server answers; RuntimeError with the reason if it does not within the time."""
        end, reason = time.monotonic() + timeout_s, "it says nothing"
        while time.monotonic() < end:
            try:
                async with asyncio.timeout(max(end - time.monotonic(), 0.0)):
                    await self.ask("GET", "/health")
                return
            except RuntimeError as error:
                reason = str(error)
            except TimeoutError:
                break
            await asyncio.sleep(min(PROBE_S, max(end - time.monotonic(), 0.0)))
        raise RuntimeError(f"no vLLM server answers within generation.server.timeout_s={timeout_s:g} s: {reason}")

    async def ask(self, method: str, path: str, **given: Any) -> Any:
        """The answer to a request of any HTTP method, as JSON; `given` are aiohttp's options. Raises as `post` does."""
        try:
            async with self._session.request(method, self.url + path, **given) as answer:
                if answer.status == 401:
                    raise RuntimeError(f"{self.url} wants another token than that of MEGATRON_GRPO_TOKEN, or any")
                if answer.status >= 400:
                    said = await answer.text()
                    said = said if len(said) <= 500 else f"{said[:500]}…"
                    raise RuntimeError(f"{self.url}{path} answers {answer.status}: {said}")
                return await answer.json() if answer.content_type == "application/json" else None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerGoneError(f"{self.url}: {error}") from error


class OtherWeightsError(Exception):
    """A response was sampled by weights that are not this run's."""


class ServerEngine:
    """Ray actor, beside one server, with the methods of `VllmEngine`.

    The server calls each version of the weights by a name that no other run has. So every response says whether this
    run's weights sampled it, and a server that was started again is found out, brought to the current version, and
    asked again.
    """

    _client: ServerClient
    """Set by `start`."""

    def __init__(self, settings: VllmSettings) -> None:
        begin_process_log(f"generation engine {settings.index}")
        self._settings = settings
        self._url = settings.config.server.urls[settings.index].rstrip("/")
        self._timeout_s = settings.config.server.timeout_s
        self._prefix = f"{secrets.token_hex(8)}:"
        self._tokenizer: Any = None
        self._asked: dict[str, asyncio.Task[GenerationOutput | str]] = {}
        self._statistics = EngineStatistics()
        self._source: tuple[RefitMode, dict[str, Any], int] | None = None
        """Where weights come from: the arguments of `connect_weights`."""
        self._version: int | None = None
        """The version that was committed last; None: none was."""
        self._serving = asyncio.Event()
        """Whether the server may be asked; not while its weights change, nor when that has failed."""
        self._mending = asyncio.Lock()

    @phase("start")
    async def start(self) -> tuple[dict[str, float], EngineProcesses]:
        """Find the server and check that it serves the run's model.

        Returns:
            Seconds by part: "server": until it answered and was checked. And this actor's processes.
        """
        from transformers import AutoTokenizer  # here: seconds to import, in which the server may come up

        began = time.monotonic()
        self._tokenizer = AutoTokenizer.from_pretrained(self._settings.model_path)
        self._client = ServerClient(self._url, self._settings.token)
        await self._client.wait_until_up(self._timeout_s)
        await self._require_fitting()
        return {"server": time.monotonic() - began}, own_processes()

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Any]:
        if self._settings.in_flight is None:
            if not self._serving.is_set():
                raise RuntimeError(f"{self._url}: the weights are incomplete: a refit was not committed")
            await self._mend()  # so that it is known to serve the version before it samples anything
        tasks: dict[asyncio.Task[GenerationOutput | str], int] = {}
        for index, request in enumerate(requests):
            name = f"{call}.{index}"
            self._asked[name] = asyncio.create_task(self._answer(name, request, settings))
            tasks[self._asked[name]] = index
        self._statistics.in_flight(len(self._asked))
        try:
            with phase("generate"):
                async for done in in_bunches(tasks):
                    yield pickled([(index, self._outcome(task)) for index, task in done.items()])
        finally:
            for task in tasks:
                task.cancel()  # which ends the connection, and with it the request
            for index in range(len(requests)):
                self._asked.pop(f"{call}.{index}", None)
            self._statistics.in_flight(len(self._asked))

    async def abort(self, call: str, indices: list[int]) -> None:
        for index in indices:
            if task := self._asked.get(f"{call}.{index}"):
                task.cancel()

    def take_counts(self) -> EngineCounts:
        return self._statistics.take()

    @phase("connect the refit")
    async def connect_weights(self, mode: RefitMode, rendezvous: dict[str, Any], first_receiver: int) -> None:
        self._source = (mode, rendezvous, first_receiver)
        await self._client.wait_until_up(self._timeout_s)
        await self._on_workers("connect_refit", *self._source)

    @phase("receive weights")
    async def receive_weights(self, version: int) -> None:
        self._serving.clear()
        async with self._mending:
            await self._receive(version)

    @phase("commit weights")
    async def commit_weights(self, version: int) -> None:
        await self._commit(version)
        self._version = version
        self._serving.set()

    def shutdown(self) -> None:
        """The server goes on; it is not this run's."""

    async def _answer(
        self, name: str, request: GenerationRequest, settings: SamplingSettings
    ) -> GenerationOutput | str:
        """A response that this run's weights sampled, whatever becomes of the server meanwhile."""
        arguments = sampling_arguments(request, settings, self._settings.max_total_sequence_length)
        body = {
            "request_id": name,
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": {key: value for key, value in arguments.items() if value != []},
        }
        while True:
            await self._serving.wait()
            if self._settings.keeps_cache:  # prompts that are cached under different weights are different
                body["cache_salt"] = f"{self._prefix}{self._version}"
            try:
                answer = await self._client.post("/inference/v1/generate", body)
                return self._read(answer)
            except (ServerGoneError, OtherWeightsError) as error:
                logger.warning("%s: %s: %s", name, type(error).__name__, error)
                await self._mend()

    def _read(self, answer: dict[str, Any]) -> GenerationOutput | str:
        """The response in an answer of the server, or why there is none.

        Raises:
            OtherWeightsError: some token is of weights that are not this run's.
        """
        (choice,) = answer["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            return f"the server ended a request early: {choice['finish_reason']}"
        versions = choice["weight_versions"]
        if not versions or not all(one["version"].startswith(self._prefix) for one in versions):
            raise OtherWeightsError
        token_ids, content = choice["token_ids"], choice["logprobs"]["content"]
        assert [one["token_id"] for one in content] == token_ids, "one log-probability per sampled token"
        logprobs = [math.nan if one["logprob"] == NO_NUMBER else one["logprob"] for one in content]
        return GenerationOutput(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            stop_reason=choice["finish_reason"],
            spans=[Span(one["start"], one["end"], int(one["version"].removeprefix(self._prefix))) for one in versions],
        )

    async def _mend(self) -> None:
        """Return when the server serves the current version; one that has lost it is given it again.

        Raises:
            RuntimeError: the server stays away, or cannot be given the version.
        """
        async with self._mending:
            version = self._version
            try:
                served = await self._served()
            except ServerGoneError:
                await self._client.wait_until_up(self._timeout_s)
                served = await self._served()
            if version is None or served == f"{self._prefix}{version}":
                return
            mode, *_ = self._source or ("none",)
            if mode != "files":
                raise RuntimeError(
                    f"{self._url} was started anew and has lost version {version}, which refit.mode={mode} brings at "
                    "the end of a step alone; with refit.mode=files such a server reads it from the folder"
                )
            logger.warning("%s serves %s and is given version %d again", self._url, served, version)
            await self._require_fitting()
            await self._receive(version)
            await self._commit(version)

    async def _served(self) -> str:
        """What the server calls the weights that it serves."""
        served: str = (await self._client.ask("GET", "/weight_info"))["weight_version"]
        if ":" in served and not served.startswith(self._prefix) and self._version is not None:
            raise RuntimeError(f"{self._url} was given weights by another run; a server serves one at a time")
        return served

    async def _receive(self, version: int) -> None:
        """Pause the server and let its workers take a version, which is what it calls its weights from then on."""
        await self._client.post("/pause", mode="keep", clear_cache="false" if self._settings.keeps_cache else "true")
        started_anew = self._version is not None and not (await self._served()).startswith(self._prefix)
        if started_anew and self._source is not None and self._source[0] == "files":
            await self._on_workers("connect_refit", *self._source)
        await self._on_workers("receive_refit", version)
        await self._client.post("/update_weight_version", {"new_version": f"{self._prefix}{version}"})

    async def _commit(self, version: int) -> None:
        """Let the server serve the version that it received; RuntimeError if it has lost that."""
        if await self._served() != f"{self._prefix}{version}":
            raise RuntimeError(f"{self._url} was started anew since it received version {version}")
        if not self._settings.keeps_cache and not (await self._client.post("/reset_prefix_cache"))["success"]:
            raise RuntimeError(f"{self._url} could not empty its prefix cache, which is of other weights")
        await self._client.post("/resume")

    async def _on_workers(self, method: str, *arguments: Any) -> None:
        """Call a method of refit.worker.RefitWorker on every worker; RuntimeError with all that went wrong."""
        problems = await self._client.on_workers(method, *arguments)
        if any(problems):
            raise RuntimeError("; ".join(f"{self._url}: {problem}" for problem in problems if problem))

    async def _require_fitting(self) -> None:
        """RuntimeError unless the server can be refitted, and serves the run's model in the run's layout."""
        url = self._url
        try:
            worker, *_ = await self._client.on_workers("describe")
        except RuntimeError as error:
            raise RuntimeError(
                f"{url} cannot be refitted: {error}; start it with python -m megatron_grpo.serve"
            ) from None
        if "problem" in worker:
            raise RuntimeError(f"{url}: {worker['problem']}")
        expected = json.loads(json.dumps(asdict(shape_of_folder(self._settings.model_path))))
        other = [
            f"{name} {worker['shape'].get(name)}, not {value}"
            for name, value in expected.items()
            if worker["shape"].get(name) != value
        ]
        if other:
            model = f"policy.model.path={self._settings.model_path}"
            raise RuntimeError(f"{url} serves another model than {model}: {'; '.join(other)}")
        for name in ("tensor", "pipeline", "expert"):
            if worker[name] != getattr(self._settings.config.parallel, name):
                raise RuntimeError(
                    f"{url} runs with {name} {worker[name]}; give generation.parallel.{name}={worker[name]}"
                )
        if worker["longest"] < self._settings.max_total_sequence_length:
            raise RuntimeError(
                f"{url} takes sequences of {worker['longest']} tokens; start it with --max-model-len="
                f"{self._settings.max_total_sequence_length} (policy.max_total_sequence_length)"
            )

    def _outcome(self, task: asyncio.Task[GenerationOutput | str]) -> GenerationOutput | str:
        if task.cancelled():
            return "the request was aborted"
        output = task.result()
        if not isinstance(output, str):
            self._statistics.completed(len(output.token_ids))
        return output
