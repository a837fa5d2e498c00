"""Rewards from a user's own functions, called as TRL's GRPOTrainer calls them, and turns from a user's own agent."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import signal
import threading
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ModelAccess
from megatron_grpo.environments.interface import Environment

logger = logging.getLogger(__name__)


class TimeLimitPassed(BaseException):
    """Raised inside code that takes too long; a BaseException, so that `except Exception` there does not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeLimitPassed if the body exceeds a limit. Main thread only, where Python delivers signals.

    The signal is SIGUSR2, because reward functions may use SIGALRM themselves (math-verify does). A call that never
    returns to the interpreter is not interrupted; the deadline of the process ends it.

    Args:
        seconds: the limit; None: no limit.
    """
    if seconds is None:
        yield
        return
    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR2, _raise_in_body)
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(main, signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # from here on the timer sends no signal
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL if before is None else before)


def _raise_in_body(signum: int, frame: FrameType | None) -> None:
    raise TimeLimitPassed


RewardFunction = Callable[..., Any]
"""Function of prompts=, completions= and each column of the data=, which returns one reward per completion (None: no
reward), or a coroutine of these."""

PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Arguments other than data columns; each is passed to functions that have such a parameter."""


class RewardError(RunError):
    """A reward function raised, took too long, or returned something other than a list of rewards."""

    timed_out = False
    """Whether the function took too long."""


Outcome = list[float | None] | RewardError
"""The rewards of a function, or its failure."""


class RewardCall:
    """A reward function (or callable object) and its parameters."""

    def __init__(self, function: RewardFunction) -> None:
        name = getattr(function, "__qualname__", type(function).__name__)
        self._function = function
        self._path = f"{getattr(function, '__module__', '?')}.{name}"
        self._accepts = _accepted(function)
        self._requires = {one.name for one in _required(function)} - {*PASSED}

    def attempt(
        self, arguments: Mapping[str, Any], count: int, timeout_s: float | None
    ) -> Outcome | Coroutine[Any, Any, Outcome]:
        """Call the function for `count` completions: its rewards or its failure; a coroutine of these if it is async.

        Main thread only.
        """
        try:
            with time_limit(timeout_s):
                given = self._function(**self._taken(arguments, count))
            return self._awaited(given, count, timeout_s) if inspect.isawaitable(given) else self._rewards(given, count)
        except TimeLimitPassed:
            return self._timed_out(timeout_s)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it becomes the failure
            return self._failure(error)

    async def _awaited(self, given: Awaitable[Any], count: int, timeout_s: float | None) -> Outcome:
        """Await an async function, which is cancelled when it takes too long; returns its rewards or its failure."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                rewards = await given
            return self._rewards(rewards, count)
        except Exception as error:  # noqa: BLE001 - as in `attempt`
            late = limit.expired() and not isinstance(error, RewardError)
            return self._timed_out(timeout_s) if late else self._failure(error)

    def _taken(self, arguments: Mapping[str, Any], count: int) -> dict[str, Any]:
        """Copy the arguments that the function takes; a column that none of the rows has is a list of None.

        Each call has its own copies, so that a function may change them: neither other functions nor other samples,
        which share the row of their prompt, see that.
        """
        taken = {name: value for name, value in arguments.items() if self._accepts is None or name in self._accepts}
        copies = {name: _copied(value) if isinstance(value, list) else value for name, value in taken.items()}
        return {name: [None] * count for name in self._requires} | copies

    def _rewards(self, given: Any, count: int) -> list[float | None]:
        is_list = isinstance(given, Iterable) and getattr(given, "ndim", 1) > 0
        if not is_list or isinstance(given, Mapping | Set | str | bytes):  # these have no order, or no numbers
            raise RewardError(f"{self._path} gave {type(given).__name__}, and no list of rewards")
        rewards = list(given)
        if len(rewards) != count:
            raise RewardError(f"{self._path} gave {len(rewards)} rewards for {count} completions")
        try:
            return [_reward(reward) for reward in rewards]
        except (TypeError, ValueError) as error:
            text = f"{self._path} gave something that is neither a number nor None: {error}"
            raise RewardError(text) from error

    def _timed_out(self, timeout_s: float | None) -> RewardError:
        failure = RewardError(f"{self._path} gave no rewards within reward_timeout_s={timeout_s:g} s")
        failure.timed_out = True
        return failure

    def _failure(self, error: Exception) -> RewardError:
        if isinstance(error, RewardError):
            return error
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        failure = RewardError(f"{self._path} raised {type(error).__name__}: {error} ({where})")
        failure.__cause__ = error
        return failure


def load_reward_function(path: str) -> RewardFunction:
    """Import the function or object at a path (an instance, if it is a class); RunError: it cannot be used, and why."""
    function = load_callable("reward function", path, instance=True)
    check_parameters(path, function)
    return function


def load_callable(kind: str, path: str, *, instance: bool = False) -> Callable[..., Any]:
    """Import the function or object at a path (package.module.name, or an attribute of an object there).

    With `instance`, a class is instantiated. RunError: the import fails, or the object is not callable.
    """
    module, _, name = path.rpartition(".")
    outer, _, holder = module.rpartition(".")
    try:
        try:
            found = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if not outer or error.name != module:
                raise
            found = getattr(getattr(importlib.import_module(outer), holder), name)
        function: Any = found() if instance and inspect.isclass(found) else found
    except Exception as error:  # a user's module may raise anything while it is imported
        raise RunError(f"{kind} {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise RunError(f"{kind} {path} is {type(function).__name__}, which cannot be called")
    return function


def check_parameters(path: str, function: RewardFunction, columns: Collection[str] | None = None) -> None:
    """Check that a function accepts prompts, completions and the columns of the data as keyword arguments.

    Args:
        path: the function's import path, for messages.
        function: the function.
        columns: names of all columns of the rows that the function will score; None: unknown.

    Raises:
        RunError: the function does not accept them.
    """
    text = f"reward function {path} must take prompts and completions by name (or **kwargs)"
    own = _required(function, of_wrapped=False)  # a wrapper may turn keywords into positions
    unnamed = [one.name for one in own if one.kind is inspect.Parameter.POSITIONAL_ONLY]
    if unnamed:
        raise RunError(f"{text}; it takes {', '.join(unnamed)} by position only: leave the / out of its parameters")
    accepts = _accepted(function)
    if accepts is not None and not accepts & {"prompts", "completions", "completion_ids"}:
        raise RunError(f"{text}; it takes {', '.join(sorted(accepts)) or 'nothing'}")
    lacking = [one.name for one in _required(function) if one.name not in (*PASSED, *(columns or ()))]
    if columns is not None and lacking:
        there = ", ".join(sorted(columns)) or "none"
        raise RunError(
            f"reward function {path} takes {', '.join(lacking)}, and the data has no such column; it has {there}"
        )


def _parameters(function: RewardFunction, of_wrapped: bool = True) -> Sequence[inspect.Parameter]:
    """Parameters of a function, or of the function that it wraps; **kwargs for a builtin without a signature."""
    try:
        return list(inspect.signature(function, follow_wrapped=of_wrapped).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def _accepted(function: RewardFunction) -> frozenset[str] | None:
    """Keyword names that a function accepts; None: any name."""
    parameters = _parameters(function)
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(one.name for one in parameters if one.kind in by_name)


def _required(function: RewardFunction, of_wrapped: bool = True) -> list[inspect.Parameter]:
    """Parameters without a default."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = _parameters(function, of_wrapped)
    return [one for one in parameters if one.kind not in variadic and one.default is inspect.Parameter.empty]


_NOT_COLUMNS = ("prompt", "completion", REFERENCE, *PASSED)
"""Names that are not passed on as columns: prompts and completions hold the first two, the others are reserved."""


@dataclass(eq=False)
class RewardFunctionEnvironment(Environment):
    """Reward: the weighted sum of the rewards of several functions; None is left out of the sum, as in TRL.

    If the prompt is a text, completions are texts; if it is a list of messages, each completion is a list of one
    assistant message. A column that a row lacks is None for it. Functions are called one after the other; awaitables
    that async functions return are then awaited together.
    """

    functions: Mapping[str, RewardFunction]
    weights: Mapping[str, float]
    """Factor of each function's reward in the sum, by name of the function."""
    correctness: str | None
    """Name of the function whose reward above 0 means correct, and whose None means unknown; None: no such function."""
    timeout_s: float | None = None
    """Deadline of one call of a function, in seconds; None: only the deadline of the process."""
    tolerant: bool = False
    """Whether a failed function counts as reward None; otherwise the rollout fails."""
    reads_token_ids = True

    def __post_init__(self) -> None:
        assert self.functions.keys() == self.weights.keys(), "a weight for every function"
        self._calls = {name: RewardCall(function) for name, function in self.functions.items()}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed: set[str] = set()

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Call the functions, and return the weighted sums of their rewards.

        Raises:
            RewardError: a function raised, took too long, or did not return a number (or None) for each completion; the
                message says which function, what it raised and where. Not raised if `tolerant`.
        """
        scores = [EnvironmentReturn(reward=None, correct=None) for _ in requests]
        figures: defaultdict[str, list[float]] = defaultdict(list)
        outcomes = self._outcomes(self.functions, self._arguments(requests, scores, figures), len(requests))
        for name in self.functions:  # in the order of the configuration, whichever finished first
            outcome = outcomes[name]
            if isinstance(outcome, RewardError):
                outcome = self._one_by_one(name, outcome, requests, scores)
            for score, reward in zip(scores, outcome, strict=True):
                if reward is not None:
                    score.parts[name] = reward
        for score in scores:
            if score.parts:
                score.reward = sum(self.weights[name] * value for name, value in score.parts.items())
            if self.correctness in score.parts:
                score.correct = score.parts[self.correctness] > 0
            score.metrics = {name: fmean(values) for name, values in figures.items()}
        return scores

    def _outcomes(self, names: Iterable[str], arguments: Mapping[str, Any], count: int) -> dict[str, Outcome]:
        """Call functions for `count` responses, async ones concurrently; returns the rewards or failure of each."""
        attempts = {name: self._calls[name].attempt(arguments, count, self.timeout_s) for name in names}
        waiting = {name: one for name, one in attempts.items() if isinstance(one, Coroutine)}
        outcomes = {name: one for name, one in attempts.items() if not isinstance(one, Coroutine)}
        if waiting:
            if self._loop is None:  # one loop for all calls: a client that a function keeps is bound to it
                self._loop = asyncio.new_event_loop()
            outcomes |= zip(waiting, self._loop.run_until_complete(_together(waiting.values())), strict=True)
        return outcomes

    def _one_by_one(
        self, name: str, failure: RewardError, requests: Sequence[EnvironmentRequest], scores: list[EnvironmentReturn]
    ) -> list[float | None]:
        """Call a function that failed for all responses again for each response alone; None where it fails again."""
        if not self.tolerant:
            raise failure
        if name not in self._failed:
            self._failed.add(name)
            logger.warning("%s; its reward is None for such responses (on_reward_error=none)", failure)
        rewards: list[float | None] = []
        for request, score in zip(requests, scores, strict=True):
            outcome: Outcome = failure
            if len(requests) > 1 and not failure.timed_out:  # after a timeout, each call could time out again
                unused = [EnvironmentReturn(reward=None, correct=None)]
                outcome = self._outcomes([name], self._arguments([request], unused, defaultdict(list)), 1)[name]
            score.errors += isinstance(outcome, RewardError)
            rewards += [None] if isinstance(outcome, RewardError) else outcome
        return rewards

    def columns(self, requests: Sequence[EnvironmentRequest]) -> dict[str, list[Any]]:
        """Columns of the rows by name, each a list with one value per request."""
        names = dict.fromkeys(key for request in requests for key in request.extra_env_info if key not in _NOT_COLUMNS)
        return {name: [request.extra_env_info.get(name) for request in requests] for name in names}

    def _arguments(
        self,
        requests: Sequence[EnvironmentRequest],
        scores: Sequence[EnvironmentReturn],
        figures: defaultdict[str, list[float]],
    ) -> dict[str, Any]:
        """Keyword arguments of the functions; log_extra writes to the notes of `scores`, log_metric to `figures`."""

        def log_metric(name: str, value: float) -> None:
            figures[name].append(float(value))

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for score, value in zip(scores, values, strict=True):
                score.notes[column] = value if isinstance(value, str) else json.dumps(value, default=str)

        ids = [request.response_ids for request in requests]
        return {
            "prompts": [request.prompt for request in requests],
            "completions": [_completion(request) for request in requests],
            "completion_ids": [[] if one is None else one.tolist() for one in ids],
            **self.columns(requests),
            "trainer_state": requests[0].trainer_state,
            "log_metric": log_metric,
            "log_extra": log_extra,
        }


def _reward(value: Any) -> float | None:
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is a text")
    return None if value is None else float(value)


def _copied(values: list[Any]) -> list[Any]:
    """Deep copies of the values, each by itself: two samples never share a value."""
    return [value[:] if isinstance(value, list) and _are_whole(value) else deepcopy(value) for value in values]


def _are_whole(values: list[Any]) -> bool:
    """Whether all values are whole numbers, as token ids are, which deepcopy copies slowly."""
    return {*map(type, values)} <= {int}


async def _together(waiting: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*waiting)


def _completion(request: EnvironmentRequest) -> str | list[dict[str, str]]:
    if isinstance(request.prompt, str):
        return request.response
    return [{"role": "assistant", "content": request.response}]


AgentFunction = Callable[..., Any]
"""Function of prompt=, access= and each column of the row=, which returns any value, or a coroutine of it."""

RESULT = "agent_result"
"""Name of the reward functions' argument that holds the agent's return value for each rollout."""


@dataclass(eq=False, kw_only=True)
class AgentEnvironment(RewardFunctionEnvironment):
    """Environment in which an agent runs a rollout as a client of the model, and reward functions score it."""

    agent_function: AgentFunction
    agent = True

    def act(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any], access: ModelAccess) -> Any:
        columns = {name: value for name, value in extra_env_info.items() if name not in ("prompt", REFERENCE)}
        result = self.agent_function(prompt=prompt, access=access, **columns)
        return asyncio.run(_together([result]))[0] if inspect.isawaitable(result) else result

    def columns(self, requests: Sequence[EnvironmentRequest]) -> dict[str, list[Any]]:
        return {**super().columns(requests), RESULT: [request.state for request in requests]}


def load_agent_function(path: str) -> AgentFunction:
    """Import the agent at a path (package.module.function); RunError: it cannot be used, and why."""
    function = load_callable("agent", path)
    try:
        inspect.signature(function).bind_partial(prompt="", access=None)
    except (TypeError, ValueError) as error:
        raise RunError(f"agent {path} must take prompt and access by name (or **kwargs): {error}") from error
    return function
