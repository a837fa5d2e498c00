"""Episodes of a real OpenEnv server on loopback: turns, rewards, sessions, failures."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.openenv import OpenEnvEnvironment
from megatron_grpo.environments.registry import create_environment

PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable)
"""Interpreter with openenv-core, whose dependencies (gradio, fastmcp) need not be beside ours."""
SERVER = Path(__file__).parents[1] / "support" / "openenv_server.py"

if subprocess.run([PYTHON, "-c", "import openenv.core.env_server"], capture_output=True, check=False).returncode:
    pytest.skip("openenv-core is not installed; OPENENV_PYTHON names an interpreter with it", allow_module_level=True)


class Server:
    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([PYTHON, str(SERVER), str(self.port)])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server did not start")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.end()


def open_environment(server: Server, **options: Any) -> Any:
    values = {"url": f"http://127.0.0.1:{server.port}", "observation": "text", **options}
    return create_environment(EnvironmentConfig(type="openenv", options=values))


def score(environment: Any, state: Any) -> float | None:
    request = EnvironmentRequest(prompt="", response="", stop_reason="stop", state=state, extra_env_info={})
    return environment.score([request])[0].reward


def test_turns_have_the_servers_observations_and_rewards(server: Server) -> None:
    environment = open_environment(server)
    state = environment.reset("guess", {"reset": {"seed": 7}})
    turn = environment.step(state, "5")
    assert (turn.done, turn.text, turn.reward) == (False, "1: larger", -0.25)
    turn = environment.step(turn.state, "not a number")
    assert (turn.done, turn.reward) == (False, 0.0)
    assert turn.text.startswith("error: ")
    turn = environment.step(turn.state, "9")
    assert turn.text == "3: smaller"
    turn = environment.step(turn.state, "7")
    assert (turn.done, turn.reward) == (True, 1.0)
    assert score(environment, turn.state) == 0.0, "the rewards of the turns are added to it"


def test_another_process_and_a_closed_session_continue_a_rollout(server: Server) -> None:
    environment = open_environment(server, sessions=1)
    first = environment.step(environment.reset("", {"reset": {"seed": 3}}), "1").state
    second = environment.step(environment.reset("", {"reset": {"seed": 4}}), "9").state
    refused = environment.step(first, "no number")
    environment.step(second, "x")  # takes the only session
    turn = environment.step(refused.state, "2")
    assert turn.text == "3: larger", "its session was closed twice, and its actions repeated, the refused one too"
    other_environment = open_environment(server)
    assert other_environment.step(second, "8").text == "2: smaller"
    assert other_environment.step(replace(second, actions=()), "8").text == "1: smaller", (
        "a step that is repeated is no other one"
    )
    for owner, state in ((environment, turn.state), (other_environment, second)):
        score(owner, state)


def test_actions_may_be_objects(server: Server) -> None:
    environment = open_environment(server, action=None, observation=None)
    state = environment.reset("", {"reset": {"seed": 1}})
    assert environment.step(state, "7").text == "error: write a JSON object"
    assert environment.step(state, '{"guess": 7}').text.startswith("error: ")
    turn = environment.step(state, '{"message": "7"}')
    assert '"text": "1: smaller"' in turn.text
    score(environment, turn.state)


def test_mistakes() -> None:
    assert OpenEnvEnvironment.option_problems({"url": "localhost:8000"}) == [
        ("url=localhost:8000", "is no address: give ws://HOST:PORT or http://HOST:PORT")
    ]


def test_a_lost_server_fails_the_rollout(server: Server) -> None:
    environment = open_environment(server)
    state = environment.reset("", {"reset": {"seed": 2}})
    server.end()
    with pytest.raises(RunError, match="gave no answer"):
        environment.step(state, "1")
    with pytest.raises(RunError, match="cannot be reached"):
        open_environment(server)
    server.start()
    assert environment.step(state, "1").text == "1: larger", "the second attempt"
