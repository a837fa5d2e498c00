"""Environments of OpenEnv servers: reset and step over WebSocket sessions."""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.config.errors import RunError, select_first_line
from megatron_grpo.config.secret_values import read_secret
from megatron_grpo.config.section import Positive, Seconds
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, Turn
from megatron_grpo.environments.interface import Environment

RESET = "reset"  # column with the arguments of the server's reset, such as {"seed": 3}; a row may lack it

# Codes of the server's errors for which the action is to blame.
_OF_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")


class _RefusedError(ValueError):
    """The server refuses an action; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Episode:
    """State of a rollout, from which any process can continue it."""

    name: str
    arguments: dict[str, Any]  # of the server's reset
    actions: tuple[dict[str, Any], ...] = ()
    is_rewarded: bool = False  # the server gave a reward
    is_over: bool = False


@dataclass(eq=False)
class OpenEnvEnvironment(Environment):
    """Reward is the sum of the rewards that an OpenEnv server gives.

    Each turn is an action, and the model reads the observation that follows it. A rollout has a session of its own. A
    process that does not have its session, because it is another process or has closed it, resets a session with the
    same arguments and repeats the actions, so the environment has to follow from them.
    """

    multi_turn = True
    url: str
    """Address of the server: ws://HOST:PORT or http://HOST:PORT."""
    action: str | None = "message"
    """Field of the action that gets the response; None: the response is the action, as a JSON object."""
    observation: str | None = None
    """Field of the observation that the model reads; None: the whole observation, as JSON."""
    sessions: Positive = 64
    """Most sessions of a process; the one that was used longest ago makes room."""
    timeout_s: Seconds = 60.0
    """Deadline of an answer of the server."""
    api_key_variable: str | None = None
    """Environment variable with the server's API key; None: the server needs none."""

    def __post_init__(self) -> None:
        self._headers: dict[str, str] = {}
        if self.api_key_variable is not None:
            self._headers["Authorization"] = f"Bearer {read_secret(self.api_key_variable, 'options.api_key_variable')}"
        self._sessions: OrderedDict[str, tuple[Any, int]] = OrderedDict()  # connection and number of its actions
        self._close(self._open())  # a server that cannot be reached ends the start

    @classmethod
    def option_problems(cls, options: dict[str, Any]) -> list[tuple[str, str]]:
        """Find an address without a scheme."""
        url = options["url"]
        is_known = url.startswith(("ws://", "wss://", "http://", "https://"))
        return [] if is_known else [(f"url={url}", "is no address: give ws://HOST:PORT or http://HOST:PORT")]

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Episode:
        episode = Episode(uuid.uuid4().hex, dict(extra_env_info.get(RESET) or {}))
        self._take_session(episode)
        return episode

    def step(self, state: Episode, response: str) -> Turn:
        try:
            action = {self.action: response} if self.action is not None else _parse_action(response)
        except _RefusedError as error:
            return Turn(done=False, state=state, text=f"error: {error}", reward=0.0)
        connection = self._take_session(state)
        # A refused action is repeated like the others: it may have changed the environment before it failed.
        state = replace(state, actions=(*state.actions, action))
        self._sessions[state.name] = connection, len(state.actions)
        try:
            answer = self._ask(connection, {"type": "step", "data": action}, state.name)
        except _RefusedError as error:
            return Turn(done=False, state=state, text=f"error: {error}", reward=0.0)
        if answer["done"]:
            self._close(self._sessions.pop(state.name)[0])
        observation = answer["observation"]
        content = observation if self.observation is None else observation.get(self.observation, "")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        reward, is_over = answer["reward"], bool(answer["done"])
        state = replace(state, is_rewarded=state.is_rewarded or reward is not None, is_over=is_over)
        return Turn(done=is_over, state=state, text=text, reward=None if reward is None else float(reward))

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        # The rewards of the turns are added to it. A rollout that ended before its episode gives its session back.
        for request in requests:
            if session := self._sessions.pop(request.state.name, None):
                self._close(session[0])
        # An episode that ends without any reward has no verdict: the server could not tell.
        unknown = [request.state.is_over and not request.state.is_rewarded for request in requests]
        return [EnvironmentReturn(reward=None if is_unknown else 0.0, correct=None) for is_unknown in unknown]

    def _take_session(self, episode: Episode) -> Any:
        """Find an episode's session, or make one that repeats its actions."""
        connection, count = self._sessions.get(episode.name, (None, 0))
        if connection is not None and count == len(episode.actions):
            self._sessions.move_to_end(episode.name)
            return connection
        if connection is None:
            while len(self._sessions) >= self.sessions:
                self._close(self._sessions.popitem(last=False)[1][0])
            connection = self._open()
        self._sessions[episode.name] = connection, len(episode.actions)
        self._ask(connection, {"type": "reset", "data": episode.arguments}, episode.name)
        for action in episode.actions:
            with suppress(_RefusedError):
                self._ask(connection, {"type": "step", "data": action}, episode.name)
        return connection

    def _open(self) -> Any:
        from websockets.sync.client import connect

        address = self.url.replace("http", "ws", 1).rstrip("/") + "/ws"
        try:
            return connect(
                address, open_timeout=self.timeout_s, max_size=None, proxy=None, additional_headers=self._headers
            )
        except Exception as error:
            text = f"{type(error).__name__}: {select_first_line(error)}"
            raise RunError(f"OpenEnv server {self.url} cannot be reached: {text}") from error

    def _close(self, connection: Any) -> None:
        with suppress(Exception):  # a lost server has no session any more
            connection.send(json.dumps({"type": "close"}))
            connection.close()

    def _ask(self, connection: Any, message: dict[str, Any], name: str) -> dict[str, Any]:
        """Send a message; RunError: the server is lost or late."""
        try:
            connection.send(json.dumps(message))
            answer = json.loads(connection.recv(timeout=self.timeout_s))
        except Exception as error:
            self._sessions.pop(name, None)
            connection.close()
            text = f"{type(error).__name__}: {select_first_line(error)}"
            raise RunError(f"OpenEnv server {self.url} gave no answer: {text}") from error
        if answer["type"] == "error":
            text = answer["data"].get("message", "refused")
            if message["type"] == "step" and answer["data"].get("code") in _OF_THE_ACTION:
                raise _RefusedError(text)
            raise RunError(f"OpenEnv server {self.url}: {text}")
        return dict(answer["data"])


def _parse_action(response: str) -> dict[str, Any]:
    try:
        action = json.loads(response)
    except (ValueError, RecursionError):
        action = None
    if not isinstance(action, dict):
        raise _RefusedError("write a JSON object")
    return action
