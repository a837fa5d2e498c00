"""Lets requests with the bearer token through to a server, and no others."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from megatron_grpo.cluster.addresses import token

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]

OPEN_PATHS = ("/health",)


class TokenGuard:
    """ASGI middleware over every path but OPEN_PATHS. vLLM's own leaves those open that change weights."""

    def __init__(self, app: Application, bearer: str | None = None) -> None:
        """
        Args:
            app: what is guarded.
            bearer: the token; None: that of the environment, and without one everything is let through.
        """
        self._app, self._bearer = app, bearer or token()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and not self._lets_through(scope):
            if scope["type"] == "http":
                headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": b'{"error": {"message": "wrong or missing token"}}'})
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _lets_through(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return scope["path"] in OPEN_PATHS or is_let_through(given, self._bearer)


def is_let_through(header: bytes, bearer: str | None) -> bool:
    """Whether a request with this Authorization header has the token, if there is one."""
    return bearer is None or secrets.compare_digest(header, b"Bearer " + bearer.encode())
