"""Servers that ask, flood and steer; secrets that reach them, and nobody else."""

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.cluster.process_log import RecordFormatter
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.environments.judge import JudgeEnvironment
from megatron_grpo.environments.mcp_access import MAX_LINES, open_url
from megatron_grpo.environments.mcp_tools import McpServer, McpTools
from megatron_grpo.environments.openenv import OpenEnvEnvironment
from megatron_grpo.environments.verifiers import VerifiersEnvironment
from megatron_grpo.observability.page.write import render_report
from megatron_grpo.run.directory import override_values, record_start
from tests.support.hostile_mcp_server import FORGED

pytest.importorskip("mcp", reason="the extra mcp is not installed")
websockets_server = pytest.importorskip("websockets.sync.server")

SERVER = Path(__file__).parents[2] / "support" / "hostile_mcp_server.py"
SECRET = "s3cr3t-0f-the-run"


def make_server(*arguments: str, **options: Any) -> McpServer:
    return McpServer(command=[sys.executable, str(SERVER), *arguments], **{"timeout_s": 10.0} | options)


@pytest.fixture
def tools() -> Iterator[McpTools]:
    opened = McpTools({"hostile": make_server()})
    yield opened
    opened.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_gets_neither_model_nor_user_nor_folders(tools: McpTools) -> None:
    answers = json.loads(tools.call("ask", {}))
    assert answers.pop("ask ping") is False
    assert len(answers) == 5
    assert all(answers.values()), "every other request is refused"


def test_tools_that_change_between_calls_stay_those_of_the_start(tools: McpTools) -> None:
    names, definitions = tools.names, json.dumps(tools.definitions)
    assert tools.call("notify", {}) == "notified"
    assert json.loads(tools.call("tell", {}))
    assert tools.names == names
    assert json.dumps(tools.definitions) == definitions
    assert "exfiltrate" not in names
    assert len(definitions) < 3000, "neither titles nor instructions reach the prompts"


def test_a_flood_of_errors_becomes_some_safe_lines(tools: McpTools, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_grpo")
    assert tools.call("complain", {}) == "complained"
    wait_for(lambda: "the others are left out" in caplog.text)
    texts = [RecordFormatter("%(message)s").format(record) for record in caplog.records]
    assert len(texts) == MAX_LINES + 1
    assert all(text.startswith("MCP server hostile (") and len(text) < 1200 for text in texts)
    assert any(text.endswith(f": {FORGED}") for text in texts)
    assert not any("\x1b" in text or "\n" in text for text in texts)
    assert tools.call("tell", {})


def test_lines_that_are_no_messages_are_reported_once(tools: McpTools, caplog: pytest.LogCaptureFixture) -> None:
    assert tools.call("babble", {}) == "babbled"
    assert len(caplog.records) <= 1
    assert len(caplog.text) < 5000


def test_variables_reach_a_program_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HOSTILE_KEY", SECRET)
    monkeypatch.setenv("OTHER_KEY", "of-somebody-else")
    tools = McpTools({"hostile": make_server(variables=["HOSTILE_KEY"])})
    environment = json.loads(tools.call("tell", {}))
    assert environment["HOSTILE_KEY"] == SECRET
    assert "of-somebody-else" not in environment.values()
    assert SECRET not in list_commands()
    tools.close()
    assert SECRET not in caplog.text
    setting = "env.math.options.servers={x: {command: [server], variables: [HOSTILE_KEY]}}"
    config = override_values(
        asdict(Config()) | {"env": {"math": {"type": "tools"}}}, [setting], "file", is_trusted=True
    )
    record_start(tmp_path, config)
    assert "HOSTILE_KEY" in (tmp_path / "config.yaml").read_text()
    page = render_report([tmp_path])
    assert "HOSTILE_KEY" in page
    assert SECRET not in page + "".join(file.read_text() for file in tmp_path.glob("*.*"))


def list_commands() -> str:
    """The command lines of all processes, as `ps` shows them."""
    files = (Path(f"/proc/{name}/cmdline") for name in os.listdir("/proc") if name.isdecimal())
    return "\n".join(file.read_bytes().decode(errors="replace") for file in files if file.exists())


def test_a_header_reaches_openenv_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OPENENV_KEY", SECRET)
    headers: list[str] = []

    def look(connection: Any, request: Any) -> Any:
        headers.append(request.headers["Authorization"])
        return connection.respond(403, request.headers["Authorization"]) if len(headers) > 1 else None

    with websockets_server.serve(lambda _: None, "127.0.0.1", 0, process_request=look) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{listening.socket.getsockname()[1]}"
        environment = OpenEnvEnvironment(url=url, api_key_variable="OPENENV_KEY")
        with pytest.raises(RunError, match="cannot be reached") as caught:
            environment.reset("", {})
        listening.shutdown()
    assert headers == [f"Bearer {SECRET}"] * 2
    assert SECRET not in str(caught.value) + caplog.text + list_commands()


@pytest.mark.parametrize("secret", [f"{SECRET}\nX-Other: 1", f"\x00{SECRET}", f"{SECRET}é", f"{SECRET}\x7f1"])
def test_a_secret_that_no_header_can_hold_is_not_repeated(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"BROKEN_KEY": secret})
    openers: list[Callable[[], Any]] = [
        lambda: OpenEnvEnvironment(url="ws://127.0.0.1:1", api_key_variable="BROKEN_KEY"),
        lambda: JudgeEnvironment(url="http://127.0.0.1:1", model="m", api_key_variable="BROKEN_KEY"),
        lambda: asyncio.run(enter("http://127.0.0.1:1/mcp")),
    ]
    for opener in openers:
        with pytest.raises(ValueError, match="api_key_variable=BROKEN_KEY: its content cannot be sent") as caught:
            opener()
        assert SECRET not in str(caught.value)


async def enter(url: str) -> None:
    async with open_url(url, "BROKEN_KEY"):
        pass


@pytest.mark.parametrize(("reward", "correct"), [(None, None), (0.5, True), (0.25, False)])
def test_a_verifier_without_an_opinion_leaves_the_others_theirs(reward: float | None, correct: bool | None) -> None:
    environment = VerifiersEnvironment.__new__(VerifiersEnvironment)
    environment.correct_at = 0.5
    states = [{"reward": reward, "metrics": {}}, {"reward": 1.0, "metrics": {}}]
    requests: Any = [type("Request", (), {"state": state}) for state in states]
    assert [score.correct for score in environment.score(requests)] == [correct, True]
