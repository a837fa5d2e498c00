"""What MCP servers get from the environment: variables of programs, API keys of addresses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megatron_grpo.config.secret_values import make_authorization, read_secret


def read_variables(names: Sequence[str] | None) -> dict[str, str]:
    """Read the environment variables that a server's program gets beside PATH and the like."""
    return {name: read_secret(name, "variables") for name in names or ()}


@asynccontextmanager
async def open_with_key(url: str, variable: str) -> AsyncIterator[Any]:
    """Connect to a server that needs the API key in an environment variable."""
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with (
        create_mcp_http_client(make_authorization(variable, "api_key_variable")) as http_client,
        streamable_http_client(url, http_client=http_client) as streams,
    ):
        yield streams
