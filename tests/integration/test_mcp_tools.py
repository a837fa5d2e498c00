"""Tools of real MCP servers, over standard input and output and over HTTP, in the environment that calls tools."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.mcp_tools import McpServer, McpTools, ServerEndedError
from megatron_grpo.environments.registry import convert_options, create_environment
from megatron_grpo.environments.tools import ToolEnvironment
from megatron_grpo.models.source import CONVERSATION_VOCABULARY
from megatron_grpo.prepare.models import make_tokenizer

pytest.importorskip("mcp", reason="the extra mcp is not installed")

SERVER = Path(__file__).parents[1] / "support" / "mcp_server.py"
STDIO = [sys.executable, str(SERVER)]


@pytest.fixture(scope="module")
def tools() -> Iterator[McpTools]:
    server = McpServer(command=STDIO, timeout_s=3.0, max_characters=50)
    opened = McpTools({"tests": server})
    yield opened
    opened.close()


def test_tools_are_listed_for_the_chat_template(tools: McpTools) -> None:
    assert tools.names == ["multiply", "repeat", "wait", "refuse", "leave"]
    function = tools.definitions[0]["function"]
    assert (function["name"], function["description"]) == ("multiply", "Multiply two numbers.")
    assert function["parameters"]["properties"].keys() == {"first", "second"}


def test_results_are_capped_and_errors_are_texts_for_the_model(tools: McpTools) -> None:
    assert tools.call("multiply", {"first": 6, "second": 7}) == "42"
    assert tools.call("repeat", {"text": "ab", "times": 100}) == "ab" * 25
    with pytest.raises(ValueError, match="not today"):
        tools.call("refuse", {})
    with pytest.raises(ValueError, match="validation error"):
        tools.call("multiply", {"first": 6})


def test_a_late_tool_has_no_result(tools: McpTools) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError, match="no result within 3 s"):
        tools.call("wait", {"seconds": 60})
    assert time.monotonic() - begin < 30


def test_a_server_that_a_call_ends_is_started_again(tools: McpTools) -> None:
    with pytest.raises(ServerEndedError):
        tools.call("leave", {})
    assert tools.call("multiply", {"first": 2, "second": 2}) == "4"


@pytest.mark.parametrize(
    ("servers", "text"),
    [
        ({"one": {"command": STDIO, "allow": ["multply"]}}, "one has no tool multply; it has multiply, repeat"),
        ({"one": {"command": STDIO}, "two": {"command": STDIO}}, "MCP servers one and two both have a tool multiply"),
        ({"one": {"command": ["no-such-program"]}}, r"MCP server one \(no-such-program\): FileNotFoundError"),
        ({"one": {"url": "http://127.0.0.1:9/mcp"}}, "MCP server one .http://127.0.0.1:9/mcp.: "),
    ],
)
def test_servers_that_cannot_be_used(servers: dict[str, Any], text: str) -> None:
    with pytest.raises(RunError, match=text):
        McpTools({name: McpServer(**server) for name, server in servers.items()})


def test_a_server_has_a_command_or_a_url() -> None:
    for server in ({}, {"command": STDIO, "url": "http://localhost"}, {"command": []}):
        _, problems = convert_options(ToolEnvironment, {"servers": {"one": server}})
        assert problems == [("servers.one", "needs either a command, as a list, or a url")]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_environment_calls_them_over_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen([*STDIO, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        options = {
            "servers": {"tests": {"url": f"http://127.0.0.1:{port}/mcp", "allow": ["multiply"]}},
            "tools": ["calculator"],
            "compare": "exact",
        }
        settings = EnvironmentSettings(tokenizer=make_tokenizer(CONVERSATION_VOCABULARY, 64))
        environment = create_environment(EnvironmentConfig(type="tools", options=options), settings)
        turn = environment.step(environment.reset("6*7", {}), call("multiply", first=6, second=7))
        assert (turn.done, turn.text, turn.role) == (False, "42", "tool")
        turn = environment.step(turn.state, call("repeat", text="a", times=2) + call("calculator", expression="6+7"))
        assert turn.text == "error: there is no tool repeat; there is calculator, multiply\n13"
        turn = environment.step(turn.state, "42")
        request = EnvironmentRequest(
            prompt="", response="42", stop_reason="stop", state=turn.state, extra_env_info={REFERENCE: "42"}
        )
        assert (turn.done, environment.score([request])[0].reward) == (True, 1.0)
    finally:
        process.kill()
        process.wait()
