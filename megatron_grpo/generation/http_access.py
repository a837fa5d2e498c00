"""Access control of a run's servers: requests need the run's token, and web pages are refused."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any, override

from megatron_grpo.config.paths import TOKEN_VARIABLE, read_token

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]
NAMES_VARIABLE = "MEGATRON_GRPO_SERVER_NAMES"  # further names of a server's machine, separated by spaces
BODY_BYTES = 2**26
HEAD_BYTES = 2**16  # of a request's line and headers
REQUEST_S = 30.0  # deadline for the head of a request, and again for its body
_OPEN_PATH = "/health"  # needs no token, because it tells only whether the server is up


def find_refusal(
    method: str, headers: Mapping[str, str], bearer: str | None, names: Collection[str] = ()
) -> tuple[int, str] | None:
    """Find the status and reason of a refusal, or None.

    Names of headers are in lower case. Without a `bearer` no token is required. `names` are names of this machine
    besides its host name and localhost.
    """
    # A web page can make a browser send requests to this machine. If the page's host name is made to resolve to this
    # machine (DNS rebinding), the page can also read the answers. Browsers put the page's origin into the header Origin
    # and the host name of the request into Host, and send JSON to another origin only with that origin's permission. So
    # requests with an Origin, with an unknown name in Host or with a body other than JSON are refused. A rebound name
    # is never an IP address, so a Host that is an address is accepted.
    host = headers.get("host", "")
    if not _is_own_host(host, names):
        return 421, f"Host {host!r} is not known as a name of this machine; use its address or its host name"
    if "origin" in headers:
        return 403, "requests of web pages (Origin) are not answered"
    if bearer is not None:
        authorization = headers.get("authorization", "").encode("utf-8", "replace")
        # In constant time, so that the time of an answer does not tell how much of a token was right.
        if not secrets.compare_digest(authorization, b"Bearer " + bearer.encode()):
            return 401, "wrong or missing token"
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method in ("POST", "PUT", "PATCH") and content_type != "application/json":
        return 415, f"Content-Type {content_type!r}: a request has to be application/json"
    return None


def _is_own_host(host: str, names: Collection[str]) -> bool:
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own_names = {"localhost", socket.gethostname(), socket.getfqdn(), *names}
        return name.lower() in {own_name.lower() for own_name in own_names}
    return True


class TokenCheck:
    """ASGI middleware of vLLM's server that refuses requests (`find_refusal`).

    vLLM's own token check leaves weight updates open. RuntimeError if the environment has no token.
    """

    def __init__(self, app: Application) -> None:
        bearer = read_token()
        if bearer is None:
            raise RuntimeError(f"a server needs a token in {TOKEN_VARIABLE}; python -m megatron_grpo.serve makes one")
        self._app, self._bearer = app, bearer
        self._names = os.environ.get(NAMES_VARIABLE, "").split()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        scope_type = scope["type"]
        if scope_type == "lifespan":
            server = getattr(scope["app"].state, "server", None)  # uvicorn's, which vLLM puts there
            if server is None:  # uvicorn takes an exception here to mean that the application has no start-up
                reason = "this vLLM does not expose its uvicorn server"
                await send({"type": "lifespan.startup.failed", "message": reason})
                return
            config = server.config
            # A middleware sees only complete heads, so incomplete ones are bounded by the server's connections, which
            # uvicorn makes from this class.
            config.http_protocol_class = type("Bounded", (_BoundedHeads, config.http_protocol_class), {})
        if scope_type in ("http", "websocket"):
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            bearer = None if scope["path"] == _OPEN_PATH else self._bearer
            refusal = find_refusal(scope.get("method", "GET"), headers, bearer, self._names)
            line_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
            # A header has a colon, a space and a line end, too.
            if line_bytes + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > HEAD_BYTES:
                refusal = 431, f"the line and headers of a request have at most {HEAD_BYTES} bytes"
            if refusal is not None:
                await _refuse(scope_type, *refusal, send)
                return
        if scope_type == "http":
            try:
                receive = await _read_body(receive)
            except (TimeoutError, ValueError) as error:
                is_late = isinstance(error, TimeoutError)
                reason = f"no whole request within {REQUEST_S:g} s" if is_late else str(error)
                await _refuse(scope_type, 408 if is_late else 413, reason, send)
                return
        await self._app(scope, receive, send)


class _BoundedHeads(asyncio.Protocol):
    """Mixin of uvicorn's HTTP protocol that bounds a request's head."""

    transport: asyncio.Transport
    cycle: Any  # uvicorn's request and response; the one before while a head is incomplete
    _deadline: asyncio.TimerHandle | None = None
    _head = 0  # bytes of the incomplete head

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._begin_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing() or not self._is_in_head():
            self._end_head()
            return
        self._begin_head()
        self._head += len(data)
        if self._head > HEAD_BYTES:
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n\r\n")
            self.transport.close()

    def _is_in_head(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _begin_head(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(REQUEST_S, self._end_if_in_head)

    def _end_head(self) -> None:
        self._head = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_if_in_head(self) -> None:
        self._deadline = None
        if self._is_in_head():
            self.transport.abort()


async def _read_body(receive: Any) -> Callable[[], Awaitable[Any]]:
    """Read a request's body; returns a `receive` that replays it."""
    messages: list[Any] = []
    size = 0
    async with asyncio.timeout(REQUEST_S):
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
            if size > BODY_BYTES:
                raise ValueError(f"a request has at most {BODY_BYTES} bytes")

    async def replay() -> Any:
        return messages.pop(0) if messages else await receive()

    return replay


async def _refuse(scope_type: str, status: int, reason: str, send: Any) -> None:
    if scope_type == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": {"message": reason}}).encode()})
