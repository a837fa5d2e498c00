"""Answers of an OpenEnv server over a WebSocket: rewards that it does not give, and text in any language."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.registry import create_environment

server = pytest.importorskip("websockets.sync.server")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server whose answer to a step is the step's message, which is JSON."""

    def serve(connection: Any) -> None:
        for text in connection:
            message = json.loads(text)
            if message["type"] == "step":
                connection.send(json.dumps({"type": "observation", "data": json.loads(message["data"]["message"])}))
            elif message["type"] == "reset":
                connection.send(json.dumps({"type": "observation", "data": {}}))

    with server.serve(serve, "127.0.0.1", 0) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield listening.socket.getsockname()[1]
        listening.shutdown()


def open_environment(port: int, **options: Any) -> Any:
    return create_environment(EnvironmentConfig(type="openenv", options={"url": f"ws://127.0.0.1:{port}", **options}))


def play(environment: Any, *steps: tuple[float | None, bool]) -> tuple[list[float | None], float | None]:
    """The rewards of the turns and of the rollout's end, for answers of (reward, done)."""
    state, rewards = environment.reset("", {}), []
    for reward, is_over in steps:
        answer = {"observation": {"text": "on"}, "reward": reward, "done": is_over}
        turn = environment.step(state, json.dumps(answer))
        assert turn.done == is_over
        state = turn.state
        rewards.append(turn.reward)
    request = EnvironmentRequest(prompt="", response="", stop_reason="stop", extra_env_info={}, state=state)
    return rewards, environment.score([request])[0].reward


@pytest.mark.parametrize(
    ("steps", "rewards", "last"),
    [
        # The verifier gave no verdict.
        ([(None, True)], [None], None),
        ([(None, False), (None, False), (None, True)], [None, None, None], None),
        ([(None, False), (0.0, True)], [None, 0.0], 0.0),
        ([(0.5, False), (None, True)], [0.5, None], 0.0),
        # The limit of tokens ended it, so that nothing was reached.
        ([(None, False)], [None], 0.0),
        ([(-1.0, True)], [-1.0], 0.0),
    ],
)
def test_an_episode_that_ends_without_a_reward_has_none(
    port: int, steps: list[tuple[float | None, bool]], rewards: list[float | None], last: float | None
) -> None:
    assert play(open_environment(port), *steps) == (rewards, last)


@pytest.mark.parametrize("text", ["日本語", "Größe µ", "🙂 до"])
def test_observations_keep_their_letters(port: int, text: str) -> None:
    """A model reads them as they are, not as \\uXXXX."""
    answer = {"observation": {"text": text}, "reward": 0.0, "done": False}
    environment = open_environment(port)
    turn = environment.step(environment.reset("", {}), json.dumps(answer))
    assert json.loads(turn.text) == {"text": text}
    assert text in turn.text
    environment = open_environment(port, observation="text")
    assert environment.step(environment.reset("", {}), json.dumps(answer)).text == text
