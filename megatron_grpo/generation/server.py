"""An engine that is an external vLLM server: an actor with the methods of `VllmEngine`."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from io import BytesIO
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.special_tokens import decode_response, list_added_tokens
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.cluster.actor_calls import Arguments, Method
from megatron_grpo.cluster.actor_processes import list_own_processes
from megatron_grpo.cluster.futures import wrap_for_pickling
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.config.errors import CanaryError, RunError, select_first_line, to_text
from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.config.outside_text import describe_error, make_line
from megatron_grpo.data.tokenizer import encode_text, load_tokenizer, make_sample_texts, quote_difference
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.engine_canary import SAMPLING_ARGUMENTS, CanaryPrompt, CanaryResult
from megatron_grpo.generation.engine_interface import Engine, EngineStart, EngineWorker, LoaderTrace, TensorShapes
from megatron_grpo.generation.engine_statistics import EngineStatistics
from megatron_grpo.generation.vllm_requests import (
    iterate_finished,
    make_sampling_arguments,
    pack_experts,
    require_answers,
)
from megatron_grpo.models.families.reading import read_model_shape

CONNECT_S = 10.0
PROBE_S = 1.0  # between two requests to a server that does not answer
NAN_LOGPROB = -9999.0  # the server writes this number for a log-probability that is NaN
ROUNDING = 1e-3  # by which a log-probability, or a sum of probabilities, may exceed what is possible
ANSWER_BYTES = 2**30  # of an answer about all workers, at most
# Of a response: a token with its text takes some hundred bytes, a number in base 64 up to eleven.
_BASE_BYTES, _TOKEN_BYTES, _NUMBER_BYTES = 2**20, 2**12, 11

_GENERATE = "/inference/v1/generate"

logger = logging.getLogger(__name__)


class ServerGoneError(RuntimeError):
    """The connection failed, or ended before the answer."""


class OtherWeightsError(Exception):
    """A response was sampled by weights that this run did not send."""


async def read_answer(answer: aiohttp.ClientResponse, limit: int, address: str, key: str) -> Any:
    """Read the JSON of a server's answer; None: it is empty.

    RunError: it is an error or redirection, no JSON, or has more than `limit` bytes. `key`: of the server's address.
    """
    try:
        await answer.content.readexactly(limit + 1)
    except asyncio.IncompleteReadError as error:
        content = error.partial
    else:
        raise RunError(f"{address} gives an answer of more than {limit} bytes")
    if answer.status >= 300:
        text, target = content.decode(errors="replace"), answer.headers.get("Location")
        text = make_line(text if target is None else f"which redirects to {target}; give that in {key}")
        raise RunError(f"{address} answers {answer.status}: {text}")
    try:
        return json.loads(content) if content else None
    except (ValueError, RecursionError) as error:
        quoted = to_text(content.decode(errors="replace"))
        raise RunError(f"{address} gives no JSON ({select_first_line(error)}), but {quoted}") from None


class ServerEngine(Engine):
    """Ray actor that stands for one external server.

    Names of versions have a prefix that is unique to the run, so every response shows whether this run's weights
    sampled it. A server that was restarted shows by its version: it gets the current version, and the request again.
    """

    _session: aiohttp.ClientSession  # set by `start`, inside the event loop

    def __init__(self, settings: VllmSettings) -> None:
        begin_process_log(f"generation engine {settings.index}")
        self._settings = settings
        self._url = settings.config.server.urls[settings.index].rstrip("/")
        self._timeout_s = settings.config.server.timeout_s
        self._prefix = f"{secrets.token_hex(8)}:"
        self._tokenizer: Any = None
        self._requests: dict[str, asyncio.Task[GenerationOutput | str]] = {}
        self._statistics = EngineStatistics()
        self._vocab = 0  # tokens of the model; set by `start`
        self._source: tuple[RefitMode, dict[str, Any], int] | None = None  # arguments of the last `connect_weights`
        self._version: int | None = None  # committed last; None: no version was committed
        self._connections = 0  # to a policy, which trains a version again after a restart
        # Set while the server may sample: not during a change of weights, nor after a failed one.
        self._serving = asyncio.Event()
        self._version_lock = asyncio.Lock()  # held while the server gets a version

    @phase("start")
    async def start(self) -> EngineStart:
        began = time.monotonic()
        self._tokenizer = load_tokenizer(self._settings.model_path)
        bearer = self._settings.token
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # no limit of connections: vLLM's scheduler queues requests
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers={} if bearer is None else {"Authorization": f"Bearer {bearer}"},
        )
        await self._wait_until_up()
        await self._require_fitting_server()
        return EngineStart({"server": time.monotonic() - began}, list_own_processes(), settings={})

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str = ""
    ) -> AsyncIterator[Any]:
        # With updates in flight a request waits in `_sample` instead, and a restarted server shows by its versions.
        if self._settings.in_flight is None:
            if not self._serving.is_set():
                raise RuntimeError(f"{self._url}: the weights are incomplete: a refit was not committed")
            await self._ensure_current_version()
        tasks: dict[asyncio.Task[GenerationOutput | str], int] = {}
        for index, request in enumerate(requests):
            name = f"{call}.{index}"
            self._requests[name] = asyncio.create_task(self._sample(name, request, settings))
            tasks[self._requests[name]] = index
        self._statistics.set_in_flight(len(self._requests))
        try:
            with phase("generate"):
                async for finished in iterate_finished(tasks):
                    outputs: list[tuple[int, GenerationOutput | str]] = []
                    for index, task in finished.items():
                        output = "the request was aborted" if task.cancelled() else task.result()
                        if not isinstance(output, str):
                            self._statistics.count_tokens(len(output.token_ids))
                        outputs.append((index, output))
                    yield wrap_for_pickling(outputs)
        finally:
            for task in tasks:
                task.cancel()  # closes the connection, which aborts the request
            for index in range(len(requests)):
                self._requests.pop(f"{call}.{index}", None)
            self._statistics.set_in_flight(len(self._requests))

    async def abort(self, call: str, indices: list[int]) -> None:
        for index in indices:
            if task := self._requests.get(f"{call}.{index}"):
                task.cancel()

    def take_counts(self) -> EngineCounts:
        return self._statistics.take()

    @phase("trace loaders")
    async def trace_weights(self, mode: RefitMode, tensors: TensorShapes, needs_boxes: bool) -> list[LoaderTrace]:
        await self._wait_until_up()
        return await self._call_workers(EngineWorker.trace_weights, mode, tensors, needs_boxes)

    @phase("connect the refit")
    async def connect_weights(self, mode: RefitMode, source: dict[str, Any], first_receiver: int) -> None:
        self._source = (mode, source, first_receiver)
        self._connections += 1
        await self._wait_until_up()
        await self._call_workers(EngineWorker.connect_refit, *self._source)

    @phase("receive weights")
    async def receive_weights(self, version: int) -> None:
        self._serving.clear()
        async with self._version_lock:
            await self._receive(version)

    @phase("commit weights")
    async def commit_weights(self, version: int, awaits_canary: bool = False) -> None:
        await self._commit(version, awaits_canary)
        self._version = version
        if not awaits_canary:
            self._serving.set()

    @phase("canary")
    async def check_canary(self, prompt: CanaryPrompt) -> CanaryResult:
        # The server computes the canary only while it runs; requests of this run wait for `_serving` meanwhile.
        await self._post("/resume")
        computations = (self._compute_canary(number, tokens) for number, tokens in enumerate(prompt.sequences))
        try:
            result = prompt.require_agreement(await asyncio.gather(*computations))
        except CanaryError as failure:
            await self._post("/pause", mode="keep", clear_cache="true")
            raise CanaryError(f"{self._url}: {failure}") from None
        self._serving.set()
        return result

    async def _compute_canary(self, number: int, tokens: tuple[int, ...]) -> list[float]:
        body = {"request_id": f"canary.{number}", "token_ids": list(tokens), "sampling_params": SAMPLING_ARGUMENTS}
        candidates = (await self._post(_GENERATE, body))["prompt_logprobs"][1:]
        return [by_token[str(token)]["logprob"] for token, by_token in zip(tokens[1:], candidates, strict=True)]

    @phase("fingerprint weights")
    async def fingerprint_weights(self) -> list[dict[str, list[float]]]:
        return await self._call_workers(EngineWorker.fingerprint_weights)

    def shutdown(self) -> None:
        """Do nothing: the server is not this run's."""

    async def _sample(
        self, name: str, request: GenerationRequest, settings: SamplingSettings
    ) -> GenerationOutput | str:
        arguments = make_sampling_arguments(request, settings, self._settings.max_total_sequence_length)
        body = {
            "request_id": name,
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": {key: value for key, value in arguments.items() if value != []},
        }
        most_tokens, prompt_tokens = arguments["max_tokens"], len(request.prompt_ids)
        most_bytes = _BASE_BYTES + most_tokens * _TOKEN_BYTES
        if (form := self._settings.routed) is not None:  # the server's answer has the experts of all layers
            most_bytes += (prompt_tokens + most_tokens) * (form.layers[-1] + 1) * form.top_k * _NUMBER_BYTES
        while True:
            await self._serving.wait()  # a change of weights holds requests back
            if self._settings.keeps_cache:  # separates prompts cached under different weights
                body["cache_salt"] = f"{self._prefix}{self._version}.{self._connections}"
            try:
                answer = await self._post(_GENERATE, body, most_bytes=most_bytes)
                return self._parse_response(answer, prompt_tokens, most_tokens)
            except (ServerGoneError, OtherWeightsError) as error:
                logger.warning("%s: %s: %s", name, type(error).__name__, error)
                await self._ensure_current_version()
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                text = f"gives no response ({describe_error(error)}), but {to_text(answer)}"
                raise RunError(f"{self._url}{_GENERATE} {text}") from None

    def _parse_response(self, answer: dict[str, Any], prompt_tokens: int, most_tokens: int) -> GenerationOutput | str:
        (choice,) = answer["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            return f"the server ended a request early: {choice['finish_reason']}"
        spans = choice["weight_versions"]
        if not spans or not all(span["version"].startswith(self._prefix) for span in spans):
            raise OtherWeightsError
        token_ids, content = choice["token_ids"], choice["logprobs"]["content"]
        logprobs = [math.nan if token["logprob"] == NAN_LOGPROB else token["logprob"] for token in content]
        if [token["token_id"] for token in content] != token_ids or len(token_ids) > most_tokens:
            raise ValueError(f"{len(content)} log-probabilities of other than {len(token_ids)} of {most_tokens} tokens")
        if not all(type(token) is int and 0 <= token < self._vocab for token in token_ids):
            raise ValueError(f"token ids that the model's {self._vocab} tokens have not")
        if any(logprob > ROUNDING for logprob in logprobs):
            raise ValueError("log-probabilities above 0")
        if [0, *(span["end"] for span in spans)] != [*(span["start"] for span in spans), len(token_ids)]:
            raise ValueError("weight versions of other tokens")
        routed: NDArray[np.uint8] | str | None = None
        if (form := self._settings.routed) is not None:
            encoded = choice.get("routed_experts")  # numpy's format in base 64
            chosen = None if encoded is None else np.load(BytesIO(base64.b64decode(encoded)), allow_pickle=False)
            routed = pack_experts(form, chosen, prompt_tokens + len(token_ids))
        if isinstance(routed, str):
            return routed
        return GenerationOutput(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            text=decode_response(self._tokenizer, token_ids, choice["finish_reason"]),
            stop_reason=choice["finish_reason"],
            spans=[Span(span["start"], span["end"], int(span["version"].removeprefix(self._prefix))) for span in spans],
            routed=routed,
        )

    async def _ensure_current_version(self) -> None:
        """Send the current version to a restarted server; RuntimeError if impossible."""
        async with self._version_lock:
            version = self._version
            try:
                served = await self._fetch_version_name()
            except ServerGoneError:
                await self._wait_until_up()
                served = await self._fetch_version_name()
            if version is None or served == f"{self._prefix}{version}":
                return
            assert self._source is not None, "a version was committed, so the server is connected"
            mode = self._source[0]
            if mode != "files":
                raise RuntimeError(
                    f"{self._url} was restarted and has lost version {version}, which refit.mode={mode} sends "
                    "only at the end of a step; with refit.mode=files a restarted server reads it from the folder"
                )
            logger.warning("%s serves %s and is given version %d again", self._url, served, version)
            await self._require_fitting_server()
            await self._receive(version)
            await self._commit(version)

    async def _fetch_version_name(self) -> str:
        served: str = (await self._request("GET", "/weight_info"))["weight_version"]
        # The names of runs have a colon, the name that vLLM gives the weights of the folder has none.
        if ":" in served and not served.startswith(self._prefix) and self._version is not None:
            raise RuntimeError(f"{self._url} was given weights by another run; a server serves one at a time")
        return served

    async def _receive(self, version: int) -> None:
        await self._post("/pause", mode="keep", clear_cache="false" if self._settings.keeps_cache else "true")
        # A restarted server has new workers, which are not connected; only files can connect them again by themselves.
        is_restarted = self._version is not None and not (await self._fetch_version_name()).startswith(self._prefix)
        if is_restarted and self._source is not None and self._source[0] == "files":
            await self._call_workers(EngineWorker.connect_refit, *self._source)
        await self._call_workers(EngineWorker.receive_refit, version)
        # vLLM labels tokens with this name; a server that restarts from here on has lost it, which `_commit` notices.
        await self._post("/update_weight_version", {"new_version": f"{self._prefix}{version}"})

    async def _commit(self, version: int, awaits_canary: bool = False) -> None:
        """Serve the received version; RuntimeError after a restart."""
        if await self._fetch_version_name() != f"{self._prefix}{version}":
            raise RuntimeError(f"{self._url} was restarted since it received version {version}")
        if not self._settings.keeps_cache and not (await self._post("/reset_prefix_cache"))["success"]:
            raise RuntimeError(f"{self._url} could not empty its prefix cache, which is of other weights")
        if not awaits_canary:
            await self._post("/resume")

    async def _call_workers(self, method: Method[Arguments], *args: Arguments.args, **_: Arguments.kwargs) -> list[Any]:
        answer = await self._post("/collective_rpc", {"method": method.__name__, "args": list(args)})
        return require_answers(answer["results"], f"{self._url}: ")

    async def _require_fitting_server(self) -> None:
        url, advice = self._url, "start it with python -m megatron_grpo.serve"
        try:
            worker, *_ = await self._call_workers(EngineWorker.describe)
        except RuntimeError as error:
            raise RuntimeError(f"{url} cannot be refitted: {error}; {advice}") from None
        if "problem" in worker:
            raise RuntimeError(f"{url}: {worker['problem']}")
        expected = json.loads(json.dumps(asdict(read_model_shape(self._settings.model_path))))
        self._vocab = expected["vocab"]
        served = [(name, worker["shape"].get(name), value) for name, value in expected.items()]
        differences = [f"{name} {actual}, not {value}" for name, actual, value in served if actual != value]
        if differences:
            model = f"policy.model.path={self._settings.model_path}"
            raise RuntimeError(f"{url} serves another model than {model}: {'; '.join(differences)}")
        for name in ("tensor", "pipeline", "expert"):
            if worker[name] != getattr(self._settings.config.parallel, name):
                key = f"generation.parallel.{name}"
                raise RuntimeError(f"{url} runs with {name} {worker[name]}; give {key}={worker[name]}")
        await self._require_same_tokenizer()
        if self._settings.routed is not None and not worker["records_experts"]:
            text = "returns no experts of tokens, for policy.moe.replay_routing=true; start it with"
            raise RuntimeError(f"{url} {text} --enable-return-routed-experts")
        if worker["longest"] < self._settings.max_total_sequence_length:
            raise RuntimeError(
                f"{url} takes sequences of {worker['longest']} tokens; start it with --max-model-len="
                f"{self._settings.max_total_sequence_length} (policy.max_total_sequence_length)"
            )

    async def _require_same_tokenizer(self) -> None:
        for text in make_sample_texts(list_added_tokens(self._tokenizer)):
            ids = encode_text(self._tokenizer, text)
            if ids is None:  # it has no tokens for this text
                continue
            served: Any = (await self._post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
            expected: Any = ids
            if served == ids:
                served = (await self._post("/detokenize", {"tokens": ids}))["prompt"]
                expected = self._tokenizer.decode(ids)
            if served != expected:
                raise RuntimeError(
                    f"{self._url} has another tokenizer than policy.model.path={self._settings.model_path}: {text!r} "
                    f"gives {quote_difference(served, expected)}; start it with the same folder, without --tokenizer "
                    "and --tokenizer-mode"
                )

    async def _wait_until_up(self) -> None:
        limit, reason = f"generation.server.timeout_s={self._timeout_s:g} s", "no response"
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        await self._request("GET", "/health")
                        return
                    except RuntimeError as error:
                        reason = str(error)
                    await asyncio.sleep(PROBE_S)
        except TimeoutError:
            raise RuntimeError(f"no vLLM server answers within {limit}: {reason}") from None

    async def _post(self, path: str, body: Any = None, *, most_bytes: int = ANSWER_BYTES, **query: str) -> Any:
        return await self._request("POST", path, most_bytes, json={} if body is None else body, params=query)

    async def _request(self, method: str, path: str, most_bytes: int = ANSWER_BYTES, **options: Any) -> Any:
        """Send a request; returns parsed JSON. Raises ServerGoneError, or a server's RuntimeError."""
        try:
            # A redirection would get prompts and token, and could be to anybody.
            async with self._session.request(method, self._url + path, allow_redirects=False, **options) as answer:
                if answer.status == 401:
                    raise RunError(f"{self._url} requires a token, and MEGATRON_GRPO_TOKEN is not set to it")
                return await read_answer(answer, most_bytes, self._url + path, "generation.server.urls")
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerGoneError(f"{self._url}: {error}") from error
