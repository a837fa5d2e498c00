"""Tools of MCP servers: connections, deadlines, allow-lists, capped results."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_grpo.cluster.process_log import OncePerMessage
from megatron_grpo.config.errors import RunError, select_first_line
from megatron_grpo.config.hiding import hide_secrets
from megatron_grpo.config.section import Positive, Seconds
from megatron_grpo.environments.mcp_access import MESSAGE_BYTES, format_result, log_output, open_url, read_variables
from megatron_grpo.environments.process_guard import wrap_command

PROBE_S = 5.0  # in which a server that was late with a result has to show that it lives
MAX_TOOLS = 1000  # of a server
MAX_LATE = 8  # late calls in a row; each may hold one of the server's threads (of an SDK, 40) though it answers probes
Result = TypeVar("Result")
_ONCE = OncePerMessage()
logger = logging.getLogger(__name__)


class ServerEndedError(Exception):
    """A call ended its server, also when repeated; the text is for the model."""


class _ConnectionLost(Exception):  # noqa: N818 - a status of a call
    """The connection ended during a call."""


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
    startup_timeout_s: Seconds = 60.0
    """Deadline of a start: the connection, and the list of tools."""
    max_characters: Positive = 4000
    """Most characters of a result that the model reads."""


class _Connection:
    """A connection, which one task of the loop holds open."""

    def __init__(self, name: str, server: McpServer) -> None:
        self.name, self.server = name, server
        self.tools: list[Any] = []  # of the server, as it was last started
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._close = asyncio.Event()
        self._is_in_doubt = False  # the last call had no result, or a malformed one
        self._late = 0  # calls without a result since the last one that had one
        self._has_answered = False  # a call had a result

    @property
    def title(self) -> str:
        """Name and address or program, for messages; arguments may be secrets."""
        address = self.server.url or (self.server.command or [""])[0]
        return hide_secrets(f"MCP server {self.name} ({address})")

    async def get_client(self) -> Any:
        """Return the open connection; RunError: there is none, and a new one fails."""
        is_in_doubt = self._client is not None and self._is_in_doubt
        if is_in_doubt and (self._late >= MAX_LATE or not await self._is_alive()):
            logger.warning("%s hangs; it is started again, or connected to again", self.title)
            await self.close()
        self._is_in_doubt = False
        return self._client or await self._open()

    async def _open(self) -> Any:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._close, self._late = asyncio.Event(), 0
        self._task = asyncio.create_task(self._hold(ready))
        try:
            async with asyncio.timeout(self.server.startup_timeout_s):
                client = await ready
                self.tools = await self._list_tools(client)  # also after a restart: the SDK checks results with them
        except TimeoutError:
            text = "list its tools" if ready.done() and not ready.cancelled() else "answer"
            text = f"did not {text} within {self.server.startup_timeout_s:g} s"
            raise RunError(f"{self.title} {text}") from None
        else:
            self._client = client
        finally:
            if self._client is None:
                self._task.cancel()
        return client

    async def close(self) -> None:
        self._client = None
        self._close.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=5)
            self._task.cancel()

    async def _list_tools(self, client: Any) -> list[Any]:
        tools: list[Any] = []
        cursors: list[str | None] = [None]
        while True:
            try:
                page = await client.list_tools(cursor=cursors[-1])
            except Exception as error:
                raise RunError(f"{self.title} did not list its tools: {_describe(error)}") from error
            tools += page.tools
            if not page.next_cursor:
                return tools
            if page.next_cursor in cursors or len(tools) > MAX_TOOLS:
                text = f"{len(tools)} tools, and another page at {page.next_cursor!r}"
                raise RunError(f"{self.title} gives a list of tools without an end: {text}")
            cursors.append(page.next_cursor)

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; errors are those of `McpTools.call`."""
        try:
            return await self._call_once(tool, arguments)
        except _ConnectionLost as error:
            # Perhaps the server had ended before, so the call is repeated before it counts as the reason.
            logger.warning("%s is lost over a call of %s: %s", self.title, tool, error)
        try:
            return await self._call_once(tool, arguments)
        except _ConnectionLost as error:
            if not self._has_answered:  # nothing shows that the server works
                raise RunError(f"MCP server {self.name} is lost: {error}") from None
        raise ServerEndedError("the server ended over this call, twice")

    async def _call_once(self, tool: str, arguments: dict[str, Any]) -> Any:
        client, timeout_s = await self.get_client(), self.server.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                result = await client.call_tool(tool, arguments)
        except TimeoutError:
            self._is_in_doubt = True
            self._late += 1
            raise ValueError(f"no result within {timeout_s:g} s") from None
        except Exception as error:  # noqa: BLE001 - of the transport or the protocol
            if _is_protocol_error(error):  # the server refuses the call, for example its arguments
                raise ValueError(_describe(error)) from None
            if isinstance(error, ValueError | RuntimeError):  # a result against the protocol or the tool's own schema
                self._is_in_doubt = True
                logger.warning("%s answers %s wrongly: %s", self.title, tool, _describe(error))
                raise ValueError(f"the server's result is malformed: {select_first_line(error)}") from None
            await self.close()
            raise _ConnectionLost(_describe(error)) from None
        self._late, self._has_answered = 0, True
        return result

    async def _is_alive(self) -> bool:
        try:
            async with asyncio.timeout(min(PROBE_S, self.server.timeout_s)):
                await self._client.session.list_tools()  # protocols from 2026 on have no ping
        except Exception as error:  # noqa: BLE001 - of the transport or the protocol
            return _is_protocol_error(error)
        return True

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        # The SDK wants a connection to be closed by the task that opened it.
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        server, close = self.server, self._close
        opened = ExitStack()
        try:
            if server.command is not None:
                if shutil.which(server.command[0]) is None:
                    raise FileNotFoundError(f"there is no program {server.command[0]}")
                program, *arguments = wrap_command(server.command, MESSAGE_BYTES)
                variables = read_variables(server.variables)
                parameters = StdioServerParameters(command=program, args=arguments, env=variables)
                target = stdio_client(parameters, opened.enter_context(log_output(self.title)))
            else:
                assert server.url is not None, "a server has a command or a URL"
                target = open_url(server.url, server.api_key_variable)
            async with Client(target) as client:
                ready.set_result(client)
                await close.wait()
        except Exception as error:  # noqa: BLE001 - of the transport, the server's program or the protocol
            if not ready.done():
                ready.set_exception(RunError(f"{self.title}: {_describe(error)}"))
        finally:
            opened.close()
            if self._task is asyncio.current_task():  # otherwise there is another connection by now
                self._client = None


class McpTools:
    """The allowed tools of some servers; a thread of its own talks to them.

    RunError: a server does not start, lacks an allowed tool, or has a tool of the same name as another server.
    """

    def __init__(self, servers: Mapping[str, McpServer]) -> None:
        self.definitions: list[dict[str, Any]] = []  # as data.tools has them
        self._owners: dict[str, _Connection] = {}  # by name of the tool
        self._loop = asyncio.new_event_loop()
        if servers:
            # The SDK logs a traceback for every line of a server's output that is no message.
            logging.getLogger("mcp.client.stdio").addFilter(_ONCE)
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

        ValueError, with a text for the model: the arguments cannot be sent, the tool reports an error, is late, or
        gives a malformed result. ServerEndedError: the call ended its server twice. RunError: the server is lost, and
        does not come back or has never answered a call. The next call connects again.
        """
        _require_message(name, arguments)
        connection = self._owners[name]
        result = self._run(connection.call(name, arguments))
        text = format_result(result)[: connection.server.max_characters]
        if result.is_error:
            raise ValueError(text or "the tool failed, and does not say why")
        return text

    def close(self) -> None:
        """End all connections, and the servers that they started."""
        for connection in self._connections:
            self._run(connection.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _add_tools(self, connection: _Connection) -> None:
        await connection.get_client()
        tools = connection.tools
        allow = connection.server.allow
        missing = sorted({*(allow or ())} - {tool.name for tool in tools})
        if missing:
            names = ", ".join(tool.name for tool in tools)
            raise RunError(f"MCP server {connection.name} has no tool {', '.join(missing)}; it has {names}")
        for tool in tools:
            if allow is not None and tool.name not in allow:
                continue
            if owner := self._owners.get(tool.name):
                if owner is connection:
                    raise RunError(f"{connection.title} lists the tool {tool.name} twice")
                text = f"both have a tool {tool.name}; use allow"
                raise RunError(f"MCP servers {owner.name} and {connection.name} {text}")
            self._owners[tool.name] = connection
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            self.definitions.append({"type": "function", "function": function})


def _require_message(name: str, arguments: dict[str, Any]) -> None:
    """Check that a call can be sent; ValueError: its arguments cannot."""
    # A message that it cannot write would end the connection, with the calls of other rollouts.
    from mcp.types import CallToolRequest, CallToolRequestParams

    try:
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        text = request.model_dump_json(by_alias=True, exclude_unset=True)
        is_same = json.loads(text)["params"]["arguments"] == arguments
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments cannot be written as JSON: {select_first_line(error)}") from None
    if not is_same:
        raise ValueError("the arguments cannot be written as JSON: not every number is finite")


def _is_protocol_error(error: Exception) -> bool:
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.error.code != CONNECTION_CLOSED


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {select_first_line(error)}"
