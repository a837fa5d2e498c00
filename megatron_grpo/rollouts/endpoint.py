"""The OpenAI-compatible endpoint of a rollout worker, at which agents call engines; each rollout has its own URL."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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

MODEL = "policy"  # name of the model in requests and answers
IDLE_CONNECTIONS = 512  # without a request; beyond it, the oldest are closed

_COMMON_FIELDS = {"model", "max_tokens", "n", "stream", "logprobs", "top_logprobs", "user", "temperature", "top_p"}
_CHAT_FIELDS = {*_COMMON_FIELDS, "messages", "max_completion_tokens", "tools", "chat_template_kwargs"}
_COMPLETION_FIELDS = {*_COMMON_FIELDS, "prompt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """Address, token and tokenizer of a rollout worker's endpoint."""

    host: str
    port: int  # 0: any free port
    token: str | None = field(repr=False)  # bearer token; None: not required, because only this machine has access
    tokenizer: Any = field(repr=False)  # folder with the tokenizer, or the tokenizer that a script passed


def make_endpoint_settings(config: EndpointConfig, tokenizer: Any) -> EndpointSettings | None:
    """Make the settings of generation.endpoint; None: it is not enabled."""
    if not config.enabled:
        return None
    return EndpointSettings(host=config.host, port=config.port, token=read_token(), tokenizer=tokenizer)


class Endpoint:
    """HTTP server of a rollout worker, for calls of agents."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._open: dict[str, Conversation] = {}
        self.tokenizer: Any = None  # from transformers; set by `start`, like the port
        self.port = 0
        self._renderers: dict[str, PromptRenderer] = {}  # by task
        # Connections (aiohttp's protocols) with a request, and the others with the time since when they have none.
        self._busy: set[Any] = set()
        self._idle_since: dict[Any, float] = {}

    async def start(self) -> None:
        """Load the tokenizer and listen; SamplingError if the address is unusable."""
        tokenizer = self._settings.tokenizer
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._check_access])
        for base in ("/v1", "/rollouts/{rollout}/v1"):
            app.router.add_get(f"{base}/models", self._list_models)
            app.router.add_post(f"{base}/chat/completions", partial(self._answer_call, accepted=_CHAT_FIELDS))
            app.router.add_post(f"{base}/completions", partial(self._answer_call, accepted=_COMPLETION_FIELDS))
        app.cleanup_ctx.append(self._close_idle_connections)
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        try:
            await web.TCPSite(self.runner, self._settings.host, self._settings.port).start()
        except OSError as error:
            where = f"generation.endpoint.host={self._settings.host} and port={self._settings.port}"
            raise SamplingError(f"the endpoint cannot listen at {where}: {error.strerror or error}") from None
        self.port = self.runner.addresses[0][1]

    def get_renderer(self, task: str, prompts: PromptFormat) -> PromptRenderer:
        return self._renderers.setdefault(task, PromptRenderer(self.tokenizer, prompts))

    @contextmanager
    def open_rollout(self, conversation: Conversation) -> Iterator[ModelAccess]:
        """Open a rollout to an agent's calls; yields its address."""
        # The name cannot be guessed, so an agent reaches only the rollout that it was started for.
        name, host = secrets.token_urlsafe(16), self._settings.host
        if host in ("0.0.0.0", "::"):  # the server listens on all addresses of the machine
            host = find_node_address()
        url_host = f"[{host}]" if ":" in host else host
        self._open[name] = conversation
        try:
            url = f"http://{url_host}:{self.port}/rollouts/{name}/v1"
            yield ModelAccess(url, self._settings.token or "none", MODEL)
        finally:
            del self._open[name]
            conversation.end()

    async def _close_idle_connections(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch_connections())
        yield
        task.cancel()

    async def _watch_connections(self) -> None:
        # Agents may keep connections open, or begin requests and never end them; each one takes a file descriptor.
        while True:
            await asyncio.sleep(REQUEST_S / 10)
            now = time.monotonic()
            server = self.runner.server
            connections = [] if server is None else server.connections  # the oldest first
            idle = [connection for connection in connections if connection not in self._busy]
            self._idle_since = {connection: self._idle_since.get(connection, now) for connection in idle}
            excess = len(self._idle_since) - IDLE_CONNECTIONS
            oldest_first = sorted(self._idle_since.items(), key=lambda pair: pair[1])
            for number, (connection, since) in enumerate(oldest_first):
                if number < excess or now - since >= REQUEST_S:
                    connection.force_close()

    @web.middleware
    async def _check_access(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        self._idle_since.pop(request.protocol, None)
        self._busy.add(request.protocol)
        try:
            headers = {name.lower(): value for name, value in request.headers.items()}
            refusal = find_refusal(request.method, headers, self._settings.token, (self._settings.host,))
            return await handler(request) if refusal is None else _make_error(*refusal)
        except web.HTTPException as error:
            return _make_error(error.status, error.reason)
        finally:
            self._busy.discard(request.protocol)

    async def _list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _answer_call(self, request: web.Request, accepted: set[str]) -> web.Response:
        conversation = self._open.get(request.match_info.get("rollout") or request.headers.get("X-Rollout-Id") or "")
        if conversation is None:
            return _make_error(404, "no open rollout has this name; use the base URL that the agent was given")
        try:
            call = await _read_json(request)
            _require_valid_call(call, accepted, conversation.settings)
            limit = call.get("max_completion_tokens") or call.get("max_tokens")
            if "messages" in accepted:
                variables = call.get("chat_template_kwargs")
                output = await conversation.chat(call["messages"], call.get("tools"), limit, variables)
            else:
                output = await conversation.complete(call["prompt"], limit)
            return web.json_response(self._make_answer(output, call, conversation))
        except web.HTTPException:
            raise
        except BadCallError as error:
            return _make_error(400, str(error))
        except Exception as error:  # noqa: BLE001 - the rollout fails with the error that the conversation keeps
            return _make_error(500, str(error))

    def _make_answer(self, output: GenerationOutput, call: Any, conversation: Conversation) -> dict[str, Any]:
        token_ids, logprobs = output.token_ids.tolist(), output.logprobs.tolist()
        choice: dict[str, Any] = {"index": 0, "finish_reason": output.stop_reason, "token_ids": token_ids}
        if "messages" in call:
            object_name = "chat.completion"
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
            object_name = "text_completion"
            choice["text"], choice["logprobs"] = output.text, {"token_logprobs": logprobs}
        sampled = len(token_ids)
        prompt = conversation.length - sampled
        return {
            "id": f"{object_name}-{len(conversation.outputs)}",
            "object": object_name,
            "created": int(time.time()),
            "model": MODEL,
            "choices": [choice],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        }


async def _read_json(request: web.Request) -> Any:
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


def _require_valid_call(call: Any, accepted: set[str], settings: SamplingSettings) -> None:
    """Raise BadCallError if a call is malformed or samples differently."""
    if not isinstance(call, dict):
        raise BadCallError("the request is not a JSON object")
    fields = {name: value for name, value in call.items() if value is not None}
    unknown = ", ".join(sorted(fields.keys() - accepted))
    if unknown:
        raise BadCallError(f"{unknown}: not accepted; the run's configuration (generation) decides how rollouts sample")
    for name, value in (("n", 1), ("stream", False), ("temperature", settings.temperature), ("top_p", settings.top_p)):
        if name in fields and fields[name] != value:
            raise BadCallError(f"{name}={fields[name]}: every call of this run has {value}; leave it out")
    for name in ("max_tokens", "max_completion_tokens"):
        if name in fields and (type(fields[name]) is not int or fields[name] < 1):
            raise BadCallError(f"{name}={fields[name]}: give a number above 0")
    if "messages" in accepted:
        _require_valid_chat(fields)
    elif not isinstance(fields.get("prompt"), str) and not _is_list_of(int, fields.get("prompt")):
        raise BadCallError("prompt: give a text or a list of token ids")


def _require_valid_chat(call: dict[str, Any]) -> None:
    for name in ("messages", "tools"):
        if not _is_list_of(dict, call.get(name) or ([{}] if name == "tools" else None)):
            raise BadCallError(f"{name}: give a list of objects")
    for number, message in enumerate(call["messages"], start=1):
        if not isinstance(message.get("role"), str):
            raise BadCallError(f"message {number} has no role; give system, user, assistant or tool")
    variables = call.get("chat_template_kwargs", {})
    if not isinstance(variables, dict) or RESERVED & variables.keys():
        text = f"give an object with variables of the chat template, none of them {', '.join(sorted(RESERVED))}"
        raise BadCallError(f"chat_template_kwargs: {text}")


def _is_list_of(value_type: type, values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is value_type for value in values)


def _make_error(status: int, text: str) -> web.Response:
    error = {"message": text, "type": "invalid_request_error", "code": status}
    return web.json_response({"error": error}, status=status)
