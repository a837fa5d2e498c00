"""MCP servers that hang, never end their list or answer wrongly; what the model reads of every kind of result."""

import gzip
import json
import math
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments import mcp_access, mcp_tools
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.environments.mcp_tools import MAX_LATE, McpServer, McpTools, ServerEndedError
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.tools import ToolEnvironment
from megatron_grpo.models.source import CONVERSATION_VOCABULARY
from megatron_grpo.prepare.models import make_tokenizer

pytest.importorskip("mcp", reason="the extra mcp is not installed")

SERVER = Path(__file__).parents[2] / "support" / "raw_mcp_server.py"


def make_server(mode: str, **options: Any) -> McpServer:
    return McpServer(command=[sys.executable, str(SERVER), mode], **options)


@pytest.fixture(scope="module")
def tools() -> Iterator[McpTools]:
    opened = McpTools({"raw": make_server("pages", timeout_s=1.0)})
    yield opened
    opened.close()


def get_process(tools: McpTools) -> int:
    return int(json.loads(tools.call("echo", {}))[1])


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("structured_only", '{"answer": 42}'),
        ("structured_beside", '2 rows\n{"rows": [{"name": "Größe"}, {"name": "b"}]}'),
        ("structured_again", '{"b": 2, "a": 1}'),
        ("structured_wrapped", "42"),
        ("structured_list", "a\nb"),
        ("embedded", "read 1 file\nprint(1)"),
        ("embedded_bytes", "[file:///a.png image/png, 4 base64 characters]"),
        ("link", "big.log: log: [file:///big.log]"),
        ("image", "[image image/png, 4 base64 characters]\n[audio audio/wav, 4 base64 characters]"),
        ("empty_text", ""),
        ("empty", ""),
    ],
)
def test_every_kind_of_content_reaches_the_model(tools: McpTools, tool: str, text: str) -> None:
    assert tools.call(tool, {}) == text


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("error_empty", "the tool failed, and does not say why"),
        ("error_structured", '{"code": 7}'),
        ("malformed", "the server's result is malformed"),
        ("against_schema", "the server's result is malformed"),
        ("id_of_another", "no result within 1 s"),
    ],
)
def test_a_failed_or_wrong_result_is_an_error_to_the_model_and_keeps_the_server(
    tools: McpTools, tool: str, text: str
) -> None:
    process = get_process(tools)
    with pytest.raises(ValueError, match=text):
        tools.call(tool, {})
    assert get_process(tools) == process


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    ["\ud800", {"\udfff": 1}, math.nan, [-math.inf], 10**5000, nest(300), nest(900)],
    ids=["surrogate", "name with a surrogate", "nan", "infinite", "digits", "deep", "deeper"],
)
def test_poisoned_arguments_lose_nobodys_server(tools: McpTools, value: Any) -> None:
    process = get_process(tools)
    with pytest.raises(ValueError, match="the arguments cannot be written as JSON"):
        tools.call("echo", {"a": value})
    assert get_process(tools) == process


@pytest.mark.parametrize("value", ["\x00\x1b[2J", "🙂", "\u2028", 2**70, -0.5, {"": None}, nest(40)])
def test_odd_arguments_arrive_as_they_are(tools: McpTools, value: Any) -> None:
    assert json.loads(tools.call("echo", {"a": value}))[0] == {"a": value}


def test_a_server_that_hangs_is_started_again_with_nothing_left(tools: McpTools) -> None:
    process = get_process(tools)
    with pytest.raises(ValueError, match="no result within 1 s"):
        tools.call("hang", {})
    assert get_process(tools) != process
    assert not Path(f"/proc/{process}").exists()


def test_a_server_that_writes_a_line_without_an_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "MESSAGE_BYTES", 2**20)
    tools = McpTools({"raw": make_server("pages", timeout_s=20.0)})
    try:
        process, before = get_process(tools), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ServerEndedError):
            tools.call("line_without_end", {})
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"
        assert get_process(tools) != process
    finally:
        tools.close()


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", ["endless", "packed"])
def test_an_answer_without_an_end_is_not_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server at an address; also one whose few bytes unfold to many."""
    monkeypatch.setattr(mcp_access, "MESSAGE_BYTES", 2**20)
    sent = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            if kind == "packed":
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            piece = b" " * 65536 if kind == "endless" else gzip.compress(b" " * 2**26)
            with suppress(OSError):
                while len(sent) < 1000:
                    self.wfile.write(piece)
                    sent.append(len(piece))

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(RunError, match="MCP server raw"):
            McpTools({"raw": McpServer(url=f"http://127.0.0.1:{server.server_port}/mcp", startup_timeout_s=5.0)})
        server.shutdown()
    assert sum(sent) < 2**26
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


@pytest.mark.turns(2)
def test_a_stopped_and_a_killed_server_are_started_again(tools: McpTools) -> None:
    process = get_process(tools)
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(ValueError, match="no result within 1 s"):
        tools.call("echo", {})
    stopped, process = process, get_process(tools)
    assert not Path(f"/proc/{stopped}").exists()
    os.kill(process, signal.SIGKILL)
    assert get_process(tools) != process, "the call that finds it dead is not to blame"
    with pytest.raises(ValueError, match="the server's result is malformed"):
        tools.call("against_schema", {})


@pytest.mark.turns(2)
def test_a_call_that_ends_its_server_is_its_own_fault_once_the_server_has_answered_others() -> None:
    tools = McpTools({"raw": make_server("pages")})
    try:
        with pytest.raises(RunError, match="MCP server raw is lost"):  # nothing shows that it works
            tools.call("die", {})
        process = get_process(tools)
        with pytest.raises(ServerEndedError):
            tools.call("die", {})
        assert get_process(tools) != process
    finally:
        tools.close()


@pytest.mark.turns(2)
def test_a_server_whose_calls_are_all_late_is_started_again_though_it_answers_probes() -> None:
    tools = McpTools({"raw": make_server("pages", timeout_s=0.3)})
    try:
        process = get_process(tools)
        for _ in range(MAX_LATE):
            with pytest.raises(ValueError, match=r"no result within 0\.3 s"):
                tools.call("id_of_another", {})
        assert get_process(tools) != process
    finally:
        tools.close()


@pytest.fixture(scope="module")
def environment() -> Iterator[ToolEnvironment]:
    server: dict[str, Any] = {"command": [sys.executable, str(SERVER), "pages"]}
    settings = EnvironmentSettings(tokenizer=make_tokenizer(CONVERSATION_VOCABULARY, 64))
    options = {"servers": {"raw": server}, "compare": "exact"}
    opened: Any = create_environment(EnvironmentConfig(type="tools", options=options), settings)
    opened.step(opened.reset("", {}), make_call("empty"))
    yield opened
    opened._server_tools.close()


def make_call(*names: str) -> str:
    calls = [json.dumps({"name": name, "arguments": {}}) for name in names]
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def score_turns(environment: ToolEnvironment, *responses: str) -> tuple[list[str], EnvironmentReturn]:
    """Texts that the model reads, and the score."""
    state, texts = environment.reset("", {}), []
    for response in responses:
        turn = environment.step(state, response)
        state = turn.state
        texts.append(turn.text)
        if turn.done:
            break
    request = EnvironmentRequest(
        prompt="", response="".join(responses), stop_reason="stop", extra_env_info={REFERENCE: "7"}, state=state
    )
    (score,) = environment.score([request])
    return texts, score


def test_a_model_reads_that_its_call_ended_the_server_and_may_go_on(environment: ToolEnvironment) -> None:
    texts, score = score_turns(environment, make_call("die", "structured_wrapped"), "7")
    assert texts == ["error: the server ended over this call, twice\n42", ""]
    assert (score.reward, score.fault) == (1.0, None)


@pytest.mark.turns(2)
@pytest.mark.parametrize("turns", [[("die",), ("die",)], [("die", "die")], [("die",), ("empty",), ("empty", "die")]])
def test_a_second_call_that_ends_the_server_is_the_responses_fault(
    environment: ToolEnvironment, turns: list[tuple[str, ...]]
) -> None:
    texts, score = score_turns(environment, *(make_call(*names) for names in turns), "7")
    assert len(texts) == len(turns), "the rollout ends with it"
    assert (score.reward, score.fault) == (0.0, "its calls ended an MCP server 2 times")
    assert score_turns(environment, make_call("empty"), "7")[1].reward == 1.0, "of no other rollout"


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("stuck", "gives a list of tools without an end: .* another page at '0'"),
        ("endless", "gives a list of tools without an end: 1100 tools"),
        ("silent", "did not list its tools within 2 s"),
        ("failing", "did not list its tools: MCPError: no tools today"),
        ("malformed", "did not list its tools: "),
        ("twice", "lists the tool structured_only twice"),
    ],
)
def test_a_list_of_tools_has_a_deadline_and_an_end(mode: str, text: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RunError, match=rf"^MCP server raw \({re.escape(sys.executable)}\) {text}"):
        McpTools({"raw": make_server(mode, startup_timeout_s=2.0 if mode == "silent" else 30.0)})
    assert time.monotonic() - begin < 25


def test_a_server_that_never_answers_is_named() -> None:
    server = McpServer(command=["sleep", "1000"], startup_timeout_s=1.0)
    with pytest.raises(RunError, match=r"MCP server mute \(sleep\) did not answer within 1 s"):
        McpTools({"mute": server})
