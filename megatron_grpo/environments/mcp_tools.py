"""Tools of MCP servers: connections, time limits, allow-lists, capped results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_grpo.config.errors import RunError, select_first_line
from megatron_grpo.config.section import Positive, Seconds
from megatron_grpo.environments.mcp_access import open_with_key, read_variables

CONNECT_TIMEOUT_S = 60.0  # for starting a server, or connecting to one
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """A server of the Model Context Protocol: a command, or a URL."""

    command: list[str] | None = None
    """Program and arguments of a server that speaks over standard input and output; each process starts its own."""
    variables: list[str] | None = None
    """Environment variables that the program gets, such as those with its tokens; null: PATH, HOME and the like."""
    url: str | None = None
    """Address of a server that speaks HTTP, such as http://localhost:8000/mcp."""
    api_key_variable: str | None = None
    """Environment variable with the API key of a server at a URL; null: it needs none."""
    allow: list[str] | None = None
    """Tools that the model may call; null: all of the server's."""
    timeout_s: Seconds = 30.0
    """Deadline of a call; the model then reads that there is no result."""
    max_characters: Positive = 4000
    """Most characters of a result that the model reads."""


class _Connection:
    """A connection, which one task of the loop holds open."""

    def __init__(self, name: str, server: McpServer) -> None:
        self.name, self.server = name, server
        self.client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._close = asyncio.Event()

    async def open(self) -> Any:
        """Connect; RunError: the server does not answer, or ends."""
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._close = asyncio.Event()
        self._task = asyncio.create_task(self._hold(ready))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                self.client = await ready
        except TimeoutError:
            self._task.cancel()
            raise RunError(f"MCP server {self.name} did not answer within {CONNECT_TIMEOUT_S:g} s") from None
        return self.client

    async def close(self) -> None:
        self.client = None
        self._close.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=5)
            self._task.cancel()

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        # The SDK wants a connection to be closed by the task that opened it.
        from mcp import Client, StdioServerParameters

        server = self.server
        target: Any = server.url
        try:
            if server.command is not None:
                variables = read_variables(server.variables)
                target = StdioServerParameters(command=server.command[0], args=server.command[1:], env=variables)
            elif server.url is not None and server.api_key_variable is not None:
                target = open_with_key(server.url, server.api_key_variable)
            async with Client(target) as client:
                ready.set_result(client)
                await self._close.wait()
        except Exception as error:  # noqa: BLE001 - of the transport, the server's program or the protocol
            if not ready.done():
                where = server.url or (server.command or [""])[0]
                ready.set_exception(RunError(f"MCP server {self.name} ({where}): {_describe(error)}"))
        finally:
            self.client = None


class McpTools:
    """The allowed tools of some servers; a thread of its own talks to them.

    RunError: a server does not start, lacks an allowed tool, or has a tool of the same name as another server.
    """

    def __init__(self, servers: Mapping[str, McpServer]) -> None:
        self.definitions: list[dict[str, Any]] = []  # as data.tools has them
        self._owners: dict[str, _Connection] = {}  # by name of the tool
        self._loop = asyncio.new_event_loop()
        if servers:
            threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True).start()
        self._connections = [_Connection(name, server) for name, server in servers.items()]
        try:
            for connection in self._connections:
                self._run(self._add_tools(connection))
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        return list(self._owners)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool.

        ValueError, with a text for the model: the tool reports an error, or is late. RunError: its server is lost; the
        next call connects again.
        """
        connection = self._owners[name]
        text = self._run(self._call(connection, name, arguments))
        return text[: connection.server.max_characters]

    def close(self) -> None:
        """End all connections, and the servers that they started."""
        for connection in self._connections:
            self._run(connection.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _add_tools(self, connection: _Connection) -> None:
        client = await connection.open()
        tools: list[Any] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        allow = connection.server.allow
        missing = sorted({*(allow or ())} - {tool.name for tool in tools})
        if missing:
            names = ", ".join(tool.name for tool in tools)
            raise RunError(f"MCP server {connection.name} has no tool {', '.join(missing)}; it has {names}")
        for tool in tools:
            if allow is not None and tool.name not in allow:
                continue
            if tool.name in self._owners:
                owner = self._owners[tool.name].name
                raise RunError(f"MCP servers {owner} and {connection.name} both have a tool {tool.name}; use allow")
            self._owners[tool.name] = connection
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            self.definitions.append({"type": "function", "function": function})

    async def _call(self, connection: _Connection, name: str, arguments: dict[str, Any]) -> str:
        client = connection.client or await connection.open()
        timeout_s = connection.server.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                result = await client.call_tool(name, arguments)
        except TimeoutError:
            raise ValueError(f"no result within {timeout_s:g} s") from None
        except Exception as error:  # noqa: BLE001 - of the transport or the protocol
            if _is_protocol_error(error):  # the server refuses the call, for example its arguments
                raise ValueError(_describe(error)) from None
            await connection.close()
            raise RunError(f"MCP server {connection.name} is lost: {_describe(error)}") from None
        parts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        text = "\n".join(parts)
        if result.is_error:
            raise ValueError(text[: connection.server.max_characters])
        return text


def _is_protocol_error(error: Exception) -> bool:
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.error.code != CONNECTION_CLOSED


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {select_first_line(error)}"
