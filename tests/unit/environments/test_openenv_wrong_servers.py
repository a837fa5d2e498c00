"""An OpenEnv server that answers wrongly is named, and its rollout fails: none of its rewards is believed."""

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_grpo.config.errors import ResponseError, RunError
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.environment_worker import is_outside
from megatron_grpo.environments.openenv import OpenEnvEnvironment

websockets_server = pytest.importorskip("websockets.sync.server")

GOOD = {"observation": {"text": "on"}, "reward": 0.5, "done": False}


def answer(**changes: Any) -> str:
    return json.dumps({"type": "observation", "data": {**GOOD, **changes}})


class Server:
    """A server whose answer to a step is a script of texts and pauses; other messages get one answer.

    Texts in a tuple leave in one write, so that no pause of this thread can come between them.
    """

    port: int

    def __init__(self) -> None:
        self.script: list[str | bytes | float | tuple[str, ...] | None] = []
        self.has_sent_all = threading.Event()
        self.paths: list[str] = []

    def note_path(self, connection: Any, request: Any) -> None:
        """Keep the path before the client's opening ends; the thread that serves it may begin later."""
        self.paths.append(request.path)

    def serve(self, connection: Any) -> None:
        for text in connection:
            if json.loads(text)["type"] == "reset":
                connection.send(answer())
            elif json.loads(text)["type"] == "step":
                for part in self.script:
                    if isinstance(part, float):
                        time.sleep(part)
                    elif part is None:
                        return  # the session ends
                    elif isinstance(part, tuple):
                        with connection.protocol_mutex:
                            for together in part:
                                connection.protocol.send_text(together.encode())
                            connection.send_data()
                    else:
                        connection.send(part)
                self.has_sent_all.set()


@pytest.fixture
def server() -> Iterator[Server]:
    scripted = Server()
    with websockets_server.serve(scripted.serve, "127.0.0.1", 0, process_request=scripted.note_path) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        scripted.port = listening.socket.getsockname()[1]
        yield scripted
        listening.shutdown()


def open_environment(server: Server, **options: Any) -> OpenEnvEnvironment:
    options = {"url": f"ws://127.0.0.1:{server.port}", "timeout_s": 2.0, **options}
    return OpenEnvEnvironment(**options)


def score(environment: OpenEnvEnvironment, state: Any) -> Any:
    request = EnvironmentRequest(prompt="", response="", stop_reason="stop", state=state, extra_env_info={})
    return environment.score([request])[0]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([answer(reward=math.nan)], "gave the reward nan, which is no finite number"),
        ([answer(reward=-math.inf)], "gave the reward -inf"),
        ([answer(reward=1e39)], r"gave the reward 1e\+39"),
        ([answer(reward=10**400)], "gave the reward 1000"),
        ([answer(reward="9")], "gave the reward 9"),
        ([answer(reward=[1])], r"gave the reward \[1\]"),
        ([answer(done="false")], "gave no observation, reward and done"),
        ([json.dumps({"type": "observation", "data": {"reward": 1.0}})], "gave no observation, reward and done"),
        ([answer(observation=[1])], r"without options\.observation=text: \[1\]"),
        ([answer(observation={"texts": "a"})], r"without options\.observation=text"),
        ([json.dumps({"type": "observation"})], "sent no message with a type and data"),
        ([json.dumps({"type": 3, "data": {}})], "sent no message with a type and data"),
        (["[1]"], "sent no message with a type and data"),
        ([b"\xff\xfe"], "sent no message with a type and data"),
        (["[" * 200_000], "sent no message with a type and data"),
        ([json.dumps({"type": "error", "data": {"code": "BUSY", "message": "full"}})], "full$"),
        ([answer(observation={"text": "x" * 2**20})], r"of more than options\.max_bytes=1048576 bytes"),
        ([3.0, answer()], r"gave no answer within options\.timeout_s=2 s"),
    ],
)
def test_a_wrong_answer_fails_the_rollout_alone(server: Server, script: list[Any], text: str) -> None:
    environment = open_environment(server, observation="text")
    state, other_state = environment.reset("", {}), environment.reset("", {})
    server.script = script
    with pytest.raises(RunError, match=rf"OpenEnv server ws://127\.0\.0\.1:\d+:? .*{text}") as caught:
        environment.step(state, "a")
    assert is_outside(caught.value) == (text == "full$"), "an action may be to blame, unless the server says otherwise"
    server.script = [answer()]
    assert environment.step(other_state, "a").reward == 0.5


def test_an_action_that_ends_its_session_may_be_to_blame_but_no_earlier_one_is(server: Server) -> None:
    environment = open_environment(server)
    state = environment.reset("", {})
    server.script = [answer()]
    state = environment.step(state, "a").state
    server.script = [None]
    with pytest.raises(ResponseError, match="gave no answer") as caught:
        environment.step(state, "quit")
    assert not is_outside(caught.value)
    with pytest.raises(RunError) as caught:  # the session is made again, and fails over an action that it answered
        environment.step(state, "b")
    assert is_outside(caught.value)


@pytest.mark.parametrize(
    "script",
    [
        [(answer(reward=1.0), answer())],
        [answer(reward=1.0), 0.1, answer()],
        [(answer(reward=1.0), json.dumps({"type": "state", "data": {}}))],
        [answer()] * 40,
    ],
    ids=["together", "later", "of another type", "a flood"],
)
def test_a_second_answer_is_not_that_of_the_next_action(server: Server, script: list[Any]) -> None:
    environment = open_environment(server, timeout_s=60.0)
    server.script = script
    turn = environment.step(environment.reset("", {}), "a")
    assert server.has_sent_all.wait(60)
    server.script = [answer()]
    with pytest.raises(RunError, match="sent a message that no action asked for") as caught:
        environment.step(turn.state, "b")
    assert is_outside(caught.value)


def test_a_second_answer_at_the_end_fails_the_rollout(server: Server) -> None:
    environment = open_environment(server)
    server.script = [(answer(reward=1.0, done=True), answer())]
    with pytest.raises(RunError, match="sent a message that no action asked for"):
        environment.step(environment.reset("", {}), "a")
    server.script = [(answer(reward=1.0), answer())]
    turn = environment.step(environment.reset("", {}), "a")
    assert "sent a message that no action asked for" in score(environment, turn.state)
    server.script = [answer(reward=1.0)]
    turn = environment.step(environment.reset("", {}), "a")
    assert score(environment, turn.state).reward == 0.0


@pytest.mark.parametrize("reward", [0, -3, True, 0.25, None])
def test_possible_rewards_are_those_of_their_turns(server: Server, reward: Any) -> None:
    environment = open_environment(server)
    server.script = [answer(reward=reward)]
    turn = environment.step(environment.reset("", {}), "a")
    assert turn.reward == reward
    assert reward is None or type(turn.reward) is float


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://http-env.test:{}", "/ws"),
        ("ws://http.example.test:{}/", "/ws"),
        ("ws://127.0.0.1:{}/http", "/http/ws"),
        ("http://127.0.0.1:{}/http/https/", "/http/https/ws"),
    ],
)
def test_only_the_scheme_becomes_a_websocket(
    server: Server, url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, look_up = [], socket.getaddrinfo

    def look_up_here(host: Any, *arguments: Any, **options: Any) -> Any:
        names.append(host)
        return look_up("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    url = url.format(server.port)
    OpenEnvEnvironment(url=url)
    assert names == [url.split("/")[2].split(":")[0]]
    assert server.paths == [path]


def test_a_redirection_to_another_server_is_not_followed(server: Server) -> None:
    target = f"ws://127.0.0.1:{server.port}/ws"

    def redirect(connection: Any, request: Any) -> Any:
        response = connection.respond(302, "")
        response.headers["Location"] = target
        return response

    with websockets_server.serve(lambda _: None, "127.0.0.1", 0, process_request=redirect) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{listening.socket.getsockname()[1]}"
        with pytest.raises(RunError, match=rf"OpenEnv server {url} cannot be reached"):
            OpenEnvEnvironment(url=url)
        listening.shutdown()
    assert server.paths == []


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "ws://", "http:///ws", "ws://[", ""])
def test_an_address_has_a_scheme_and_a_host(url: str) -> None:
    ((subject, text),) = OpenEnvEnvironment.option_problems({"url": url})
    assert (subject, text) == (f"url={url}", "is no address: give ws://HOST:PORT or http://HOST:PORT")
