"""What MCP servers get from the environment, and how much their answers may have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megatron_grpo.config.secret_values import make_authorization, read_secret

MESSAGE_BYTES = 2**24  # of a server; of a line, the SDK takes the square of its length
_NOT_PACKED = {"Accept-Encoding": "identity"}  # a small packed body may unfold to any size


def read_variables(names: Sequence[str] | None) -> dict[str, str]:
    """Read the environment variables that a server's program gets beside PATH and the like."""
    return {name: read_secret(name, "variables") for name in names or ()}


@asynccontextmanager
async def open_url(url: str, variable: str | None) -> AsyncIterator[Any]:
    """Connect to a server; `variable`: environment variable with its API key."""
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    key = {} if variable is None else make_authorization(variable, "api_key_variable")
    http_client = create_mcp_http_client(_NOT_PACKED | key)
    http_client.event_hooks["response"].append(_limit_body)
    async with http_client, streamable_http_client(url, http_client=http_client) as streams:
        yield streams


async def _limit_body(response: Any) -> None:
    """End a body after MESSAGE_BYTES; the SDK limits events of a stream."""
    import httpx2

    if response.headers.get("content-encoding", "identity") != "identity":
        await response.aclose()
        raise httpx2.DecodingError("the server packs its answers, though it was asked not to", request=response.request)
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return
    body = response.stream

    class LimitedBody(httpx2.AsyncByteStream):
        aclose = body.aclose

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in body:
                size += len(chunk)
                if size > MESSAGE_BYTES:
                    raise httpx2.StreamError(f"the server's answer has more than {MESSAGE_BYTES} bytes")
                yield chunk

    response.stream = LimitedBody()
