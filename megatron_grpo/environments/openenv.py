"""Environments of OpenEnv servers: reset and step over WebSocket sessions."""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from megatron_grpo.config.errors import ResponseError, RunError, select_first_line, to_text
from megatron_grpo.config.secret_values import make_authorization
from megatron_grpo.config.section import Positive, Seconds
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ScoreOrError, Turn, is_reward
from megatron_grpo.environments.interface import Environment

RESET = "reset"  # column with the arguments of the server's reset, such as {"seed": 3}; a row may lack it

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_TOO_BIG = 1009  # code with which this side closes a session after a message above the limit
# Codes of the server's errors for which the action is to blame.
_OF_THE_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")


class _RefusedError(ValueError):
    """The server refuses an action; the message is for the model."""


class _WrongAnswerError(ValueError):
    """The server sent a message that the protocol does not allow."""


class _UnaskedError(_WrongAnswerError):
    """The server sent a message that answers nothing."""


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
    max_bytes: Positive = 2**20
    """Most bytes of a message of the server; a larger answer to an action is a failure over that action."""

    def __post_init__(self) -> None:
        self._headers: dict[str, str] = {}
        if self.api_key_variable is not None:
            self._headers = make_authorization(self.api_key_variable, "options.api_key_variable")
        self._sessions: OrderedDict[str, tuple[Any, int]] = OrderedDict()  # connection and number of its actions
        self._close(self._open())  # a server that cannot be reached ends the start

    @classmethod
    def option_problems(cls, options: dict[str, Any]) -> list[tuple[str, str]]:
        """Find an address without a scheme or host."""
        url = options["url"]
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in _SCHEMES and bool(parts.hostname)
        except ValueError:
            is_address = False
        return [] if is_address else [(f"url={url}", "is no address: give ws://HOST:PORT or http://HOST:PORT")]

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
        content = answer["observation"] if self.observation is None else answer["observation"][self.observation]
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        reward, is_over = answer["reward"], answer["done"]
        state = replace(state, is_rewarded=state.is_rewarded or reward is not None, is_over=is_over)
        return Turn(done=is_over, state=state, text=text, reward=None if reward is None else float(reward))

    def score(self, requests: list[EnvironmentRequest]) -> list[ScoreOrError]:
        return [self._score_episode(request.state) for request in requests]

    def _score_episode(self, episode: Episode) -> ScoreOrError:
        """Give the session back; the score has no reward but those of the turns."""
        if session := self._sessions.pop(episode.name, None):
            connection = session[0]
            try:
                self._require_silence(connection)
            except _WrongAnswerError as error:  # the rewards may be those of other actions
                return f"OpenEnv server {self.url} {error}"
            except Exception:  # noqa: BLE001 - a server that is lost by now has answered every action
                pass
            finally:
                self._close(connection)
        # An episode that ends without any reward has no verdict: the server could not tell.
        is_unknown = episode.is_over and not episode.is_rewarded
        return EnvironmentReturn(reward=None if is_unknown else 0.0, correct=None)

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
            try:
                self._ask(connection, {"type": "step", "data": action}, episode.name)
            except _RefusedError:
                continue
            except ResponseError as error:  # an earlier action, which had an answer
                raise RunError(str(error)) from error
        return connection

    def _open(self) -> Any:
        from websockets.sync.client import connect

        parts = urlsplit(self.url)
        address = parts._replace(scheme=_SCHEMES[parts.scheme], path=parts.path.rstrip("/") + "/ws").geturl()
        # With its host and port the library refuses a redirection to another server.
        host_and_port = parts.hostname, parts.port or (443 if _SCHEMES[parts.scheme] == "wss" else 80)
        limits: dict[str, Any] = {"open_timeout": self.timeout_s, "max_size": self.max_bytes}
        try:
            return connect(address, proxy=None, address=host_and_port, additional_headers=self._headers, **limits)
        except Exception as error:
            text = f"{type(error).__name__}: {select_first_line(error)}"
            raise RunError(f"OpenEnv server {self.url} cannot be reached: {text}") from error

    def _close(self, connection: Any) -> None:
        with suppress(Exception):  # a lost server has no session any more
            connection.send(json.dumps({"type": "close"}))
            connection.close()

    def _ask(self, connection: Any, message: dict[str, Any], name: str) -> dict[str, Any]:
        """Send a message; RunError: the server is lost or late, or answers wrongly.

        ResponseError: it fails over an action, which may be one that takes forever, prints gigabytes or ends it.
        """
        is_step, is_sent, text = message["type"] == "step", False, ""
        try:
            self._require_silence(connection)
            connection.send(json.dumps(message))
            is_sent = True
            kind, data = _parse_answer(connection.recv(timeout=self.timeout_s))
            if is_step and kind != "error":
                self._check_step(data)
                if data["done"]:
                    self._require_silence(connection)
        except Exception as error:
            self._sessions.pop(name, None)
            connection.close()
            text = f"OpenEnv server {self.url} {self._describe(error)}"
            if not (is_step and is_sent) or isinstance(error, _UnaskedError):
                raise RunError(text) from error
        if text:  # raised here, because an error of the connection in its context would say that the server is lost
            raise ResponseError(text)
        if kind == "error":
            text = str(data.get("message", "refused"))
            if is_step and data.get("code") in _OF_THE_ACTION:
                raise _RefusedError(text)
            raise RunError(f"OpenEnv server {self.url}: {text}")
        return data

    def _require_silence(self, connection: Any) -> None:
        """Check that the server has sent nothing since its last answer."""
        # Answers have no ids. Messages keep their order, so whatever the server sent before it answers a ping has come.
        for has_ping in (False, True):
            if has_ping and not connection.ping().wait(self.timeout_s):
                raise TimeoutError
            with suppress(TimeoutError):
                connection.recv(timeout=0)
                raise _UnaskedError("sent a message that no action asked for")

    def _check_step(self, data: dict[str, Any]) -> None:
        reward, field, observation = data.get("reward"), self.observation, data.get("observation")
        if reward is not None and not (isinstance(reward, int | float) and is_reward(reward)):
            raise _WrongAnswerError(f"gave the reward {to_text(reward)}, which is no finite number")
        if not isinstance(data.get("done"), bool) or "reward" not in data or "observation" not in data:
            raise _WrongAnswerError(f"gave no observation, reward and done, but {to_text(data)}")
        if field is not None and not (isinstance(observation, dict) and field in observation):
            raise _WrongAnswerError(f"gave an observation without options.observation={field}: {to_text(observation)}")

    def _describe(self, error: Exception) -> str:
        if isinstance(error, _WrongAnswerError):
            return str(error)
        if getattr(getattr(error, "sent", None), "code", None) == _TOO_BIG:
            return f"sent a message of more than options.max_bytes={self.max_bytes} bytes"
        if isinstance(error, TimeoutError):
            return f"gave no answer within options.timeout_s={self.timeout_s:g} s"
        return f"gave no answer: {type(error).__name__}: {select_first_line(error)}"


def _parse_answer(text: str | bytes) -> tuple[str, dict[str, Any]]:
    """Parse a message of the server: its type and its data."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not (isinstance(answer, dict) and isinstance(answer.get("type"), str) and isinstance(answer.get("data"), dict)):
        raise _WrongAnswerError(f"sent no message with a type and data, but {to_text(text)}")
    return answer["type"], answer["data"]


def _parse_action(response: str) -> dict[str, Any]:
    try:
        action = json.loads(response)
    except (ValueError, RecursionError):
        action = None
    if not isinstance(action, dict):
        raise _RefusedError("write a JSON object")
    return action
