"""A vLLM server that runs elsewhere, behind an actor with the methods of an engine of the run's own."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
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
from megatron_grpo.sampler.requests import PACE_S, EngineStatistics, sampling_arguments
from megatron_grpo.sampler.shutdown import EngineProcesses, own_processes
from megatron_grpo.weights.families import shape_of_folder

CONNECT_S = 10.0
PROBE_S = 1.0
"""Seconds between two looks for a server that does not answer."""


class ServerGoneError(Exception):
    """The connection could not be made, or ended before the answer."""


class ServerClient:
    """One server. To be made inside an event loop.

    Args:
        url: "http://HOST:PORT".
        bearer: token that the server wants of whoever asks; None: it wants none.
    """

    def __init__(self, url: str, bearer: str | None) -> None:
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # vLLM's scheduler decides what waits
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers={} if bearer is None else {"Authorization": f"Bearer {bearer}"},
        )

    async def post(self, path: str, body: Any = None, **query: str) -> Any:
        """The answer to a POST, as JSON.

        Raises:
            ServerGoneError: the server went away, or is not there.
            RuntimeError: it refuses; says what it said.
        """
        return await self._ask("POST", path, json={} if body is None else body, params=query)

    async def get(self, path: str) -> Any:
        """The answer to a GET, as JSON; raises as `post` does."""
        return await self._ask("GET", path)

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of refit.worker.RefitWorker on every worker of the server; their answers. Raises as `post`."""
        answer = await self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        results: list[Any] = answer["results"]
        return results

    async def wait_until_up(self, timeout_s: float) -> None:
        """Return when the server answers.

        Raises:
            RuntimeError: it does not within the time; says why.
        """
        end, reason = time.monotonic() + timeout_s, "it says nothing"
        while time.monotonic() < end:
            try:
                async with asyncio.timeout(max(end - time.monotonic(), 0.0)):
                    await self.get("/health")
                return
            except (ServerGoneError, RuntimeError) as error:
                reason = str(error)
            except TimeoutError:
                break
            await asyncio.sleep(min(PROBE_S, max(end - time.monotonic(), 0.0)))
        raise RuntimeError(f"no vLLM server answers within generation.server.timeout_s={timeout_s:g} s: {reason}")

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def _ask(self, method: str, path: str, **given: Any) -> Any:
        try:
            async with self._session.request(method, self.url + path, **given) as answer:
                if answer.status == 401:
                    raise RuntimeError(f"{self.url} wants another token than that of MEGATRON_GRPO_TOKEN, or any")
                if answer.status >= 400:
                    raise RuntimeError(f"{self.url}{path} answers {answer.status}: {_said(await answer.text())}")
                return await answer.json() if answer.content_type == "application/json" else None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerGoneError(f"{self.url}: {error}") from error


def _said(text: str) -> str:
    """The beginning of an answer that refuses."""
    return text if len(text) <= 500 else f"{text[:500]}…"


PATH = "/inference/v1/generate"

NO_NUMBER = -9999.0
"""What the server writes in the place of a log-probability that is NaN."""


def request_body(
    name: str, request: GenerationRequest, settings: SamplingSettings, longest: int, salt: str | None
) -> dict[str, Any]:
    """A request as the server takes it.

    Args:
        name: name of the request.
        request: the response to sample.
        settings: temperature, filters and stop conditions.
        longest: most tokens of prompt and response together.
        salt: what separates prompts that are cached under different weights; None: nothing has to.

    Raises:
        ValueError: the prompt leaves no room for a response.
    """
    arguments = {key: value for key, value in sampling_arguments(request, settings, longest).items() if value != []}
    body = {"request_id": name, "token_ids": request.prompt_ids.tolist(), "sampling_params": arguments}
    return body if salt is None else {**body, "cache_salt": salt}


class OtherWeightsError(Exception):
    """A response was sampled by weights that are not this run's."""


def read_response(
    answer: dict[str, Any], version_of: Callable[[str], int | None], decode: Callable[[list[int]], str]
) -> GenerationOutput | str:
    """The response in an answer of the server, or why there is none.

    Args:
        answer: the server's.
        version_of: number of the version that the server calls so; None: it is not this run's.
        decode: the text of tokens.

    Raises:
        OtherWeightsError: some token is of weights that are not this run's.
    """
    (choice,) = answer["choices"]
    if choice["finish_reason"] not in ("stop", "length"):
        return f"the server ended a request early: {choice['finish_reason']}"
    spans: list[Span] = []
    for one in choice["weight_versions"] or []:
        version = version_of(one["version"])
        if version is None:
            raise OtherWeightsError
        spans.append(Span(one["start"], one["end"], version))
    if not spans:
        raise OtherWeightsError
    token_ids = choice["token_ids"]
    content = choice["logprobs"]["content"]
    assert [one["token_id"] for one in content] == token_ids, "one log-probability per sampled token"
    logprobs = [math.nan if one["logprob"] == NO_NUMBER else one["logprob"] for one in content]
    return GenerationOutput(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=decode(token_ids),
        stop_reason=choice["finish_reason"],
        spans=spans,
    )


ABORTED = "the request was aborted"
HOW_TO_START = "start it with python -m megatron_grpo.serve"

logger = logging.getLogger(__name__)


class ServerEngine:
    """Ray actor, beside one server, with the methods of `VllmEngine`.

    The server calls each version of the weights by a name that no other run has. So every response says whether this
    run's weights sampled it, and a server that was started again is found out, brought to the current version, and
    asked again.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._name = f"generation engine {settings.index}"
        begin_process_log(self._name)
        assert settings.server is not None
        self._settings, self._server = settings, settings.server
        self._prefix = f"{secrets.token_hex(8)}:"
        self._client: ServerClient | None = None
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
    async def start(self) -> dict[str, float]:
        """Find the server and look at what it serves.

        Returns:
            Seconds by part: "server": until it answered and had been looked at.
        """
        from transformers import AutoTokenizer  # here: seconds to import, in which the server may come up

        began = time.monotonic()
        self._tokenizer = AutoTokenizer.from_pretrained(self._settings.model_path)
        self._client = ServerClient(self._server.url, self._server.token)
        await self._client.wait_until_up(self._server.timeout_s)
        await self._require_fitting()
        return {"server": time.monotonic() - began}

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Any]:
        if self._settings.in_flight is None:
            if not self._serving.is_set():
                raise RuntimeError(f"{self._server.url}: the weights are incomplete: a refit was not committed")
            await self._mend()  # so that it is known to serve the version before it samples anything
        tasks: dict[asyncio.Task[GenerationOutput | str], int] = {}
        for index, request in enumerate(requests):
            name = f"{call}.{index}"
            task = asyncio.create_task(self._answer(name, request, settings))
            tasks[task] = index
            self._asked[name] = task
        self._count()
        try:
            with phase("generate"):
                while tasks:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    done, _ = await asyncio.wait(tasks, timeout=PACE_S)
                    arrived = [(tasks.pop(task), self._outcome(task)) for task in done]
                    yield pickled(arrived)
        finally:
            for task in tasks:
                task.cancel()  # which ends the connection, and with it the request
            for index in range(len(requests)):
                self._asked.pop(f"{call}.{index}", None)
            self._count()

    async def abort(self, call: str, indices: list[int]) -> None:
        for index in indices:
            task = self._asked.get(f"{call}.{index}")
            if task is not None:
                task.cancel()

    def processes(self) -> EngineProcesses:
        return own_processes()

    def take_counts(self) -> EngineCounts:
        return self._statistics.take()

    @phase("connect the refit")
    async def connect_weights(self, mode: RefitMode, rendezvous: dict[str, Any], first_receiver: int) -> None:
        self._source = (mode, rendezvous, first_receiver)
        await self._connected().wait_until_up(self._server.timeout_s)
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
        client = self._connected()
        while True:
            await self._serving.wait()
            salt = self._label(self._version) if self._settings.keeps_cache else None
            body = request_body(name, request, settings, self._settings.max_total_sequence_length, salt)
            try:
                answer = await client.post(PATH, body)
                return read_response(answer, self._version_of, self._decode)
            except (ServerGoneError, OtherWeightsError) as error:
                logger.warning("%s: %s: %s", name, type(error).__name__, error)
                await self._mend()

    async def _mend(self) -> None:
        """Return when the server serves the current version; one that has lost it is given it again.

        Raises:
            RuntimeError: it stays away, or cannot be given it.
        """
        async with self._mending:
            client, version = self._connected(), self._version
            try:
                served = await self._served()
            except ServerGoneError:
                await client.wait_until_up(self._server.timeout_s)
                served = await self._served()
            if version is None or served == self._label(version):
                return
            mode, *_ = self._source or ("none",)
            if mode != "files":
                raise RuntimeError(
                    f"{client.url} was started anew and has lost version {version}, which refit.mode={mode} brings at "
                    "the end of a step alone; with refit.mode=files such a server reads it from the folder"
                )
            logger.warning("%s serves %s and is given version %d again", client.url, served, version)
            await self._require_fitting()
            await self._receive(version)
            await self._commit(version)

    async def _served(self) -> str:
        """What the server calls the weights that it serves."""
        served: str = (await self._connected().get("/weight_info"))["weight_version"]
        if ":" in served and not served.startswith(self._prefix) and self._version is not None:
            raise RuntimeError(f"{self._server.url} was given weights by another run; a server serves one at a time")
        return served

    async def _receive(self, version: int) -> None:
        """Pause the server and let its workers take a version, which is what it calls its weights from then on."""
        client = self._connected()
        with _gone_told():
            await client.post("/pause", mode="keep", clear_cache="false" if self._settings.keeps_cache else "true")
            started_anew = self._version is not None and not (await self._served()).startswith(self._prefix)
        if started_anew and self._source is not None and self._source[0] == "files":
            await self._on_workers("connect_refit", *self._source)
        await self._on_workers("receive_refit", version)
        with _gone_told():
            await client.post("/update_weight_version", {"new_version": self._label(version)})

    async def _commit(self, version: int) -> None:
        """Let the server serve the version that it received; RuntimeError if it has lost that."""
        client = self._connected()
        with _gone_told():
            if await self._served() != self._label(version):
                raise RuntimeError(f"{client.url} was started anew since it received version {version}")
            if not self._settings.keeps_cache and not (await client.post("/reset_prefix_cache"))["success"]:
                raise RuntimeError(f"{client.url} could not empty its prefix cache, which is of other weights")
            await client.post("/resume")

    async def _on_workers(self, method: str, *arguments: Any) -> None:
        """Call a method of refit.worker.RefitWorker on every worker; RuntimeError with all that went wrong."""
        with _gone_told():
            problems = await self._connected().on_workers(method, *arguments)
        if any(problems):
            raise RuntimeError("; ".join(f"{self._server.url}: {problem}" for problem in problems if problem))

    async def _require_fitting(self) -> None:
        """RuntimeError unless the server can be refitted, and serves the run's model in the run's layout."""
        client = self._connected()
        try:
            with _gone_told():
                worker, *_ = await client.on_workers("describe")
        except RuntimeError as error:
            raise RuntimeError(f"{client.url} cannot be refitted: {error}; {HOW_TO_START}") from None
        if "problem" in worker:
            raise RuntimeError(f"{client.url}: {worker['problem']}")
        expected = json.loads(json.dumps(asdict(shape_of_folder(self._settings.model_path))))
        other = [
            f"{name} {worker['shape'].get(name)}, not {value}"
            for name, value in expected.items()
            if worker["shape"].get(name) != value
        ]
        if other:
            model = f"policy.model.path={self._settings.model_path}"
            raise RuntimeError(f"{client.url} serves another model than {model}: {'; '.join(other)}")
        layout = asdict(self._settings.config.parallel)
        for name in ("tensor", "pipeline", "expert"):
            if worker[name] != layout[name]:
                raise RuntimeError(
                    f"{client.url} runs with {name} {worker[name]}; give generation.parallel.{name}={worker[name]}"
                )
        if worker["longest"] < self._settings.max_total_sequence_length:
            raise RuntimeError(
                f"{client.url} takes sequences of {worker['longest']} tokens; start it with --max-model-len="
                f"{self._settings.max_total_sequence_length} (policy.max_total_sequence_length)"
            )

    def _label(self, version: int | None) -> str:
        """What the server calls a version of this run."""
        return f"{self._prefix}{version}"

    def _version_of(self, label: str) -> int | None:
        return int(label.removeprefix(self._prefix)) if label.startswith(self._prefix) else None

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _outcome(self, task: asyncio.Task[GenerationOutput | str]) -> GenerationOutput | str:
        if task.cancelled():
            return ABORTED
        output = task.result()
        if not isinstance(output, str):
            self._statistics.completed(len(output.token_ids))
        return output

    def _count(self) -> None:
        self._statistics.in_flight(len(self._asked))

    def _connected(self) -> ServerClient:
        assert self._client is not None, "start() comes first"
        return self._client


@contextmanager
def _gone_told() -> Iterator[None]:
    """A server that went away is a failure of what it was asked, as any other."""
    try:
        yield
    except ServerGoneError as error:
        raise RuntimeError(str(error)) from None
