"""The OpenAI-compatible endpoint of a rollout worker, at which agents call the run's engines, one URL per rollout."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiohttp import web

from megatron_grpo.batch.generation_requests import GenerationOutput, SamplingSettings
from megatron_grpo.cluster.ray_cluster import find_node_address
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.generation_schema import EndpointConfig
from megatron_grpo.config.paths import read_token
from megatron_grpo.data.prompt_renderer import RESERVED, PromptFormat, PromptRenderer
from megatron_grpo.data.scores import ModelAccess
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.generation.http_access import BODY_BYTES, REQUEST_S, find_refusal
from megatron_grpo.rollouts.conversation import BadCallError, Conversation

MODEL = "policy"
"""Name of the model in requests and answers."""
IDLE_CONNECTIONS = 512
"""Most open connections without a request under way; beyond it, the oldest are closed."""

_OF_EVERY_CALL = {"model", "max_tokens", "n", "stream", "logprobs", "top_logprobs", "user", "temperature", "top_p"}
_OF_CHAT = {*_OF_EVERY_CALL, "messages", "max_completion_tokens", "tools", "chat_template_kwargs"}
_OF_COMPLETIONS = {*_OF_EVERY_CALL, "prompt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """Address of a rollout worker's endpoint, its token and its tokenizer."""

    host: str
    port: int
    """Port of the endpoint; 0: any free port."""
    token: str | None = field(repr=False)
    """Bearer token; None: no token is required, because only this machine reaches the endpoint."""
    tokenizer: Any = field(repr=False)
    """Folder with the tokenizer, or the tokenizer that a script passed."""

    def of_worker(self, index: int) -> EndpointSettings:
        """Settings of the worker with this index; workers listen on consecutive ports."""
        return replace(self, port=self.port + index) if self.port else self


def make_endpoint_settings(config: EndpointConfig, tokenizer: Any) -> EndpointSettings | None:
    """Settings of the endpoints from generation.endpoint; None: endpoints are not enabled."""
    if not config.enabled:
        return None
    return EndpointSettings(host=config.host, port=config.port, token=read_token(), tokenizer=tokenizer)


class Endpoint:
    """Answers calls only within open rollouts, so that every sampled token belongs to a trajectory."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._open: dict[str, Conversation] = {}
        self.tokenizer: Any = None
        """The model's tokenizer, from transformers; set by `start`."""
        self._renderers: dict[str, PromptRenderer] = {}
        """Renderer of each task whose agents have called."""
        self.port = 0
        """Port on which the endpoint listens; set by `start`."""
        self._busy: set[Any] = set()
        """Connections with a request under way, as aiohttp's protocols."""
        self._idle: dict[Any, float] = {}
        """Connections without a request, each with the time at which it was first seen so."""

    async def start(self) -> None:
        """Load the tokenizer and listen; SamplingError when the address cannot be used."""
        tokenizer = self._settings.tokenizer
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._guard])
        for base in ("/v1", "/rollouts/{rollout}/v1"):
            app.router.add_get(f"{base}/models", self._models)
            app.router.add_post(f"{base}/chat/completions", partial(self._answered, known=_OF_CHAT))
            app.router.add_post(f"{base}/completions", partial(self._answered, known=_OF_COMPLETIONS))
        app.cleanup_ctx.append(self._closing_idle)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        site = web.TCPSite(self.runner, self._settings.host, self._settings.port)
        try:
            await site.start()
        except OSError as error:
            where = f"generation.endpoint.host={self._settings.host} and port={self._settings.port}"
            raise SamplingError(f"the endpoint cannot listen at {where}: {error.strerror or error}") from None
        self.port = self.runner.addresses[0][1]

    def renderer(self, task: str, prompts: PromptFormat) -> PromptRenderer:
        """The renderer of a task's conversations."""
        return self._renderers.setdefault(task, PromptRenderer(self.tokenizer, prompts))

    @contextmanager
    def opened(self, conversation: Conversation) -> Iterator[ModelAccess]:
        """Open a rollout to an agent's calls while the body runs; yields its address."""
        name = secrets.token_urlsafe(16)
        self._open[name] = conversation
        try:
            url = f"http://{_reached_at(self._settings.host)}:{self.port}/rollouts/{name}/v1"
            yield ModelAccess(url, self._settings.token or "none", MODEL)
        finally:
            del self._open[name]
            conversation.end()

    async def _closing_idle(self, _: web.Application) -> AsyncIterator[None]:
        """Close connections, while the server runs, that send no whole request in time, or are too many."""
        closing = asyncio.create_task(self._close_idle())
        yield
        closing.cancel()

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(REQUEST_S / 10)
            now = time.monotonic()
            server = self.runner.server
            connections = [] if server is None else server.connections
            self._idle = {one: self._idle.get(one, now) for one in connections if one not in self._busy}
            too_many = len(self._idle) - IDLE_CONNECTIONS
            for number, (one, since) in enumerate(sorted(self._idle.items(), key=lambda item: item[1])):
                if number < too_many or now - since >= REQUEST_S:
                    one.force_close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        self._idle.pop(request.protocol, None)
        self._busy.add(request.protocol)
        try:
            headers = {name.lower(): value for name, value in request.headers.items()}
            refused = find_refusal(request.method, headers, self._settings.token, (self._settings.host,))
            return await handler(request) if refused is None else _error(*refused)
        except web.HTTPException as error:
            return _error(error.status, error.reason)
        finally:
            self._busy.discard(request.protocol)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _answered(self, request: web.Request, known: set[str]) -> web.Response:
        name = request.match_info.get("rollout") or request.headers.get("X-Rollout-Id") or ""
        conversation = self._open.get(name)
        if conversation is None:
            return _error(404, "no open rollout has this name; ask at the base URL that the agent was given")
        try:
            call = await _content(request)
            _require_plain(call, known, conversation.settings)
            limit = call.get("max_completion_tokens") or call.get("max_tokens")
            if "messages" in known:
                variables = call.get("chat_template_kwargs")
                output = await conversation.chat(call["messages"], call.get("tools"), limit, variables)
            else:
                output = await conversation.complete(call["prompt"], limit)
            return web.json_response(self._answer(output, call, conversation))
        except web.HTTPException:
            raise
        except BadCallError as error:
            return _error(400, str(error))
        except Exception as error:  # noqa: BLE001 - the rollout fails with the error that the conversation keeps
            return _error(500, str(error))

    def _answer(self, output: GenerationOutput, call: Any, conversation: Conversation) -> dict[str, Any]:
        """Make the answer to a call, with the sampled token ids beside the text."""
        token_ids, logprobs = output.token_ids.tolist(), output.logprobs.tolist()
        choice: dict[str, Any] = {"index": 0, "finish_reason": output.stop_reason, "token_ids": token_ids}
        if "messages" in call:
            kind = "chat.completion"
            choice["message"] = {"role": "assistant", "content": output.text}
            if call.get("logprobs"):
                texts = [self.tokenizer.decode([token]) for token in token_ids]
                choice["logprobs"] = {
                    "content": [
                        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                        for text, logprob in zip(texts, logprobs, strict=True)
                    ]
                }
        else:
            kind = "text_completion"
            choice["text"], choice["logprobs"] = output.text, {"token_logprobs": logprobs}
        sampled = len(token_ids)
        prompt = conversation.length - sampled
        return {
            "id": f"{kind}-{len(conversation.outputs)}",
            "object": kind,
            "created": int(time.time()),
            "model": MODEL,
            "choices": [choice],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        }


async def _content(request: web.Request) -> Any:
    """The parsed body of a request.

    Raises:
        web.HTTPException: the body is too large, or is not complete in time.
        BadCallError: the body is not JSON, or not encoded as its headers say.
    """
    try:
        async with asyncio.timeout(REQUEST_S):
            body = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except web.RequestPayloadError as error:
        raise BadCallError(f"the request cannot be read: {error}") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # also for other bytes than UTF-8
        raise BadCallError(f"the request is not JSON: {error}") from None


def _reached_at(host: str) -> str:
    """Host for the URL of a server that listens on `host`."""
    if host in ("0.0.0.0", "::"):  # the server listens on all addresses of the machine
        host = find_node_address()
    return f"[{host}]" if ":" in host else host


def _require_plain(call: Any, known: set[str], settings: SamplingSettings) -> None:
    """Raise BadCallError for a malformed call, or one that asks for other sampling than the run's."""
    if not isinstance(call, dict):
        raise BadCallError("the request is not a JSON object")
    given = {name: value for name, value in call.items() if value is not None}
    unknown = ", ".join(sorted(given.keys() - known))
    if unknown:
        raise BadCallError(f"{unknown}: not accepted; the run's configuration (generation) decides how rollouts sample")
    for name, value in (("n", 1), ("stream", False), ("temperature", settings.temperature), ("top_p", settings.top_p)):
        if name in given and given[name] != value:
            raise BadCallError(f"{name}={given[name]}: every call of this run has {value}; leave it out")
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given and (type(given[name]) is not int or given[name] < 1):
            raise BadCallError(f"{name}={given[name]}: give a number above 0")
    if "messages" in known:
        _require_chat(given)
    elif not isinstance(given.get("prompt"), str) and not _are(int, given.get("prompt")):
        raise BadCallError("prompt: give a text or a list of token ids")


def _require_chat(call: dict[str, Any]) -> None:
    """Raise BadCallError for malformed messages, tools or variables of the chat template; nulls are left out."""
    for name in ("messages", "tools"):
        if not _are(dict, call.get(name) or ([{}] if name == "tools" else None)):
            raise BadCallError(f"{name}: give a list of objects")
    for number, message in enumerate(call["messages"], start=1):
        if not isinstance(message.get("role"), str):
            raise BadCallError(f"message {number} has no role; give system, user, assistant or tool")
    variables = call.get("chat_template_kwargs", {})
    if not isinstance(variables, dict) or RESERVED & variables.keys():
        text = f"give an object with variables of the chat template, none of them {', '.join(sorted(RESERVED))}"
        raise BadCallError(f"chat_template_kwargs: {text}")


def _are(kind: type, values: Any) -> bool:
    """Whether `values` is a non-empty list whose items all have this type."""
    return isinstance(values, list) and bool(values) and all(type(value) is kind for value in values)


def _error(status: int, text: str) -> web.Response:
    error = {"message": text, "type": "invalid_request_error", "code": status}
    return web.json_response({"error": error}, status=status)
