"""The OpenAI-compatible endpoint of a rollout worker, at which agents call engines; each rollout has its own URL."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from aiohttp import web

from megatron_grpo.cluster.ray_cluster import find_node_address
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.generation_schema import EndpointConfig
from megatron_grpo.config.outside_text import parse_json
from megatron_grpo.config.paths import read_token
from megatron_grpo.data.chat_messages import ChatMessage
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.scores import ModelAccess
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.generation.http_access import BODY_BYTES, REQUEST_S, find_refusal
from megatron_grpo.rollouts.call_forms import require_messages
from megatron_grpo.rollouts.call_prompts import BadCallError
from megatron_grpo.rollouts.call_texts import CallTexts
from megatron_grpo.rollouts.chat_protocol import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MODEL,
    RESPONSES_FIELDS,
    CallOptions,
    iterate_chunks,
    make_answer,
    read_options,
)
from megatron_grpo.rollouts.conversation import OPEN_CALLS, Conversation, Response, TooManyCallsError
from megatron_grpo.rollouts.responses_protocol import iterate_events, make_response, read_messages, read_tools

IDLE_CONNECTIONS = 512  # without a request; beyond it, the oldest are closed


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """Address, token and tokenizer of a rollout worker's endpoint."""

    host: str
    port: int  # 0: any free port
    token: str | None = field(repr=False)  # bearer token; None: not required, because only this machine has access
    tokenizer: Any = field(repr=False)  # folder with the tokenizer, or the tokenizer that a script passed
    config: EndpointConfig = field(default_factory=EndpointConfig)
    limited: bool = False  # texts are read in processes of their own, with the limits of `config`


def make_endpoint_settings(config: EndpointConfig, tokenizer: Any) -> EndpointSettings | None:
    """Make the settings of generation.endpoint; None: it is not enabled."""
    if not config.enabled:
        return None
    return EndpointSettings(
        host=config.host,
        port=config.port,
        token=read_token(),
        tokenizer=tokenizer,
        config=config,
        limited=True,
    )


@dataclass(frozen=True, slots=True)
class _OpenRollout:
    conversation: Conversation
    earlier: dict[str, list[ChatMessage]] = field(default_factory=dict)  # conversations by id of their last response
    calls: set[asyncio.Task[Any] | None] = field(default_factory=set)  # in progress
    answers: set[asyncio.Task[Any]] = field(default_factory=set)  # that are being sent


# The responses of a call, the JSON of its answer, and of a streamed one the events: each its JSON, behind the line of
# its type if it has one.
_Answered = tuple[list[Response], Any, list[str] | None]
Answer = Callable[[Any, _OpenRollout], Awaitable[_Answered]]


class Endpoint:
    """HTTP server of a rollout worker, for calls of agents."""

    def __init__(self, settings: EndpointSettings) -> None:
        self._settings = settings
        self._open: dict[str, _OpenRollout] = {}
        self.texts = CallTexts(settings.config)
        self.tokenizer: Any = None  # from transformers; set by `start`, like the port
        self.port = 0
        self._renderers: dict[str, PromptRenderer] = {}  # by task
        self._token_texts: dict[int, str] = {}  # of tokens in answers: at most the vocabulary
        # Connections (aiohttp's protocols) with a request, and the others with the time since when they have none.
        self._busy: set[Any] = set()
        self._idle_since: dict[Any, float] = {}

    async def start(self) -> None:
        """Load the tokenizer and listen; SamplingError if the address is unusable."""
        tokenizer = self._settings.tokenizer
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        await self.texts.start(tokenizer, limited=self._settings.limited)
        app = web.Application(middlewares=[self._check_access])
        for base in ("/v1", "/rollouts/{rollout}/v1"):
            app.router.add_get(f"{base}/models", self._list_models)
            app.router.add_post(f"{base}/chat/completions", partial(self._answer, answer=self._answer_chat))
            app.router.add_post(f"{base}/completions", partial(self._answer, answer=self._answer_completion))
            app.router.add_post(f"{base}/responses", partial(self._answer, answer=self._answer_response))
        app.cleanup_ctx.append(self._close_idle_connections)
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
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
        self._open[name] = _OpenRollout(conversation)
        try:
            url = f"http://{url_host}:{self.port}/rollouts/{name}/v1"
            yield ModelAccess(url, self._settings.token or "none", MODEL)
        finally:
            rollout = self._open.pop(name)
            conversation.end()
            for answer in rollout.answers:  # the agent may hold a connection that it never reads
                answer.cancel()

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

    async def _answer(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        """Answer a call to an open rollout; errors become the protocol's."""
        rollout = self._open.get(request.match_info.get("rollout") or request.headers.get("X-Rollout-Id") or "")
        if rollout is None:
            return _make_error(404, "no open rollout has this name; use the base URL that the agent was given")
        # Before the body is read: each call takes memory and a connection, however slowly it comes.
        if len(rollout.calls) >= OPEN_CALLS:
            return _make_error(429, f"{OPEN_CALLS} calls of the rollout have no answer yet; wait for one of them")
        call = asyncio.current_task()
        rollout.calls.add(call)
        try:
            return await self._answer_call(request, rollout, answer)
        finally:
            rollout.calls.discard(call)

    async def _answer_call(self, request: web.Request, rollout: _OpenRollout, answer: Answer) -> web.StreamResponse:
        try:
            call = await _read_json(request, rollout.conversation)
            responses, body, events = await answer(call, rollout)
        except web.HTTPException:
            raise
        except TooManyCallsError as error:
            return _make_error(429, str(error))
        except BadCallError as error:
            return _make_error(400, str(error))
        except Exception as error:  # noqa: BLE001 - the rollout fails with the error that the conversation keeps
            return _make_error(500, str(error))
        await _require_client(request)
        try:
            rollout.conversation.deliver(responses)
        except BadCallError as error:
            return _make_error(400, str(error))
        sending = asyncio.create_task(_send_json(request, body) if events is None else _send_events(request, events))
        rollout.answers.add(sending)
        try:
            return await sending
        except (ConnectionError, asyncio.CancelledError):
            if events is None:  # half of a JSON is no answer, but of a stream the client may have read enough
                rollout.conversation.discard(responses)
            raise
        finally:
            rollout.answers.discard(sending)

    async def _answer_chat(self, call: Any, rollout: _OpenRollout) -> _Answered:
        conversation = rollout.conversation
        options = read_options(call, CHAT_FIELDS, conversation.settings)
        messages = await conversation.store_images(call["messages"])
        responses = await self._chat(call, messages, call.get("tools"), options, conversation)
        return await asyncio.to_thread(self._make_answer, responses, call, options)

    async def _answer_completion(self, call: Any, rollout: _OpenRollout) -> _Answered:
        conversation = rollout.conversation
        options = read_options(call, COMPLETION_FIELDS, conversation.settings)
        complete = partial(conversation.complete, call["prompt"], options.max_tokens, stop=options.stop)
        responses = await _sample_together(complete, options.choices)
        return await asyncio.to_thread(self._make_answer, responses, call, options)

    def _make_answer(self, responses: list[Response], call: Any, options: CallOptions) -> _Answered:
        # On a thread: an answer may have the log-probabilities of half a million tokens.
        answer = make_answer(responses, call, options, self._decode_token)
        if not options.is_streamed:
            return responses, answer, None
        return responses, answer, [*map(json.dumps, iterate_chunks(answer, options)), "[DONE]"]

    def _decode_token(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self.tokenizer.decode([token])
        return self._token_texts[token]

    async def _answer_response(self, call: Any, rollout: _OpenRollout) -> _Answered:
        conversation = rollout.conversation
        options = read_options(call, RESPONSES_FIELDS, conversation.settings)
        if isinstance(call["input"], list):
            call = {**call, "input": await conversation.store_images(call["input"])}
        messages, instructions = read_messages(call, rollout.earlier), call.get("instructions")
        effort = (call.get("reasoning") or {}).get("effort")
        chat = {**call, "messages": messages, **({"reasoning_effort": effort} if effort else {}), "tools": None}
        if instructions is not None:
            chat["messages"] = [{"role": "system", "content": instructions}, *messages]
        (response,) = await self._chat(chat, chat["messages"], read_tools(call), options, conversation)
        answer = make_response(response, call, len(rollout.earlier) + 1)
        # Instructions are not part of the conversation that a later call goes on with.
        history = cast("list[ChatMessage]", response.history)
        rollout.earlier[answer["id"]] = history if instructions is None else history[1:]
        events = [f"{event['type']}\n{json.dumps(event)}" for event in iterate_events(answer)]
        return [response], answer, events if options.is_streamed else None

    async def _chat(
        self,
        call: dict[str, Any],
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] | None,
        options: CallOptions,
        conversation: Conversation,
    ) -> list[Response]:
        require_messages(messages)
        effort = call.get("reasoning_effort")
        variables = {**({"reasoning_effort": effort} if effort else {}), **(call.get("chat_template_kwargs") or {})}
        prompts = conversation.renderer.format
        known_tools = prompts.tools if tools is None else tools
        is_called = call.get("tool_choice") != "none"
        read = await self.texts.prepare(
            known_tools if is_called else None, {**prompts.chat_template_kwargs, **variables}
        )
        chat = partial(conversation.chat, messages, tools, options.max_tokens, variables, stop=options.stop, read=read)
        return await _sample_together(chat, options.choices)


async def _sample_together(sample: Callable[[], Coroutine[Any, Any, Response]], count: int) -> list[Response]:
    tasks = [asyncio.create_task(sample()) for _ in range(count)]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:  # the client has gone, or gets an error: it gets none of the responses
        for task in tasks:
            task.cancel()
        raise


async def _require_client(request: web.Request) -> None:
    """Raise ConnectionResetError if the client has hung up."""
    # A client may have hung up at the moment in which its responses were complete: these rounds of the event loop read
    # the end of the connection, close it and cancel this call.
    for _ in range(3):
        await asyncio.sleep(0)
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client has hung up")


async def _send_json(request: web.Request, body: Any) -> web.StreamResponse:
    reply = web.json_response(body)
    await reply.prepare(request)
    await reply.write_eof()
    return reply


async def _send_events(request: web.Request, events: list[str]) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    for event in events:
        kind, _, data = event.rpartition("\n")
        await stream.write(f"{f'event: {kind}' if kind else ''}\ndata: {data}\n\n".lstrip().encode())
    await stream.write_eof()
    return stream


async def _read_json(request: web.Request, conversation: Conversation) -> Any:
    most_bytes = conversation.most_bytes
    try:
        async with asyncio.timeout(REQUEST_S):
            body = bytearray()
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > BODY_BYTES:
                    raise web.HTTPRequestEntityTooLarge(BODY_BYTES, len(body))
                if len(body) > most_bytes:  # the rest is not read
                    raise BadCallError(
                        f"the request has more than {most_bytes} bytes, the most that it may have with this "
                        f"context window{'' if conversation.images is None else ' and data.max_images'}"
                    )
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except web.RequestPayloadError as error:
        raise BadCallError(f"the request cannot be read: {error}") from None
    try:
        return parse_json(bytes(body), conversation.most_values)
    except ValueError as error:  # also for other bytes than UTF-8
        raise BadCallError(f"the request is not JSON: {error}") from None


def _make_error(status: int, text: str) -> web.Response:
    error = {"message": text, "type": "invalid_request_error", "code": status}
    return web.json_response({"error": error}, status=status)
