"""Rewards from a user's functions, called as in TRL."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import signal
import threading
from collections import defaultdict
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from types import FrameType
from typing import Any

from megatron_grpo.config.errors import ResponseError
from megatron_grpo.config.outside_text import describe_error
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import (
    AGENT_ARGUMENTS,
    AGENT_RESULT,
    INSTANCE,
    REWARD_ARGUMENTS,
    EnvironmentRequest,
    EnvironmentReturn,
    ModelAccess,
)
from megatron_grpo.environments import user_functions
from megatron_grpo.environments.interface import Environment
from megatron_grpo.environments.user_functions import RewardFunction

logger = logging.getLogger(__name__)


class TimeLimitPassed(BaseException):
    """Raised inside code that takes too long; not an Exception."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeLimitPassed if the body exceeds a limit; None: no limit.

    Main thread only, where Python delivers signals. A call that never returns to the interpreter is not interrupted:
    the deadline of the process ends it.
    """
    if seconds is None:
        yield
        return

    def raise_in_body(signum: int, frame: FrameType | None) -> None:
        raise TimeLimitPassed

    # The signal is SIGUSR2, because reward functions may use SIGALRM themselves (math-verify does).
    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR2, raise_in_body)
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


class RewardError(ResponseError):
    """A reward function raised, or took too long."""

    is_timeout = False


class InvalidRewardsError(RewardError):
    """A reward function returned something else than a reward per completion."""


CallOutcome = list[float | None] | RewardError  # the rewards of a function, or its failure


class RewardCall:
    """A reward function (or callable object) and its parameters."""

    def __init__(self, function: RewardFunction) -> None:
        name = getattr(function, "__qualname__", type(function).__name__)
        self._function, self._owner = function, function if hasattr(function, "__qualname__") else type(function)
        self._path = f"{getattr(function, '__module__', '?')}.{name}"
        self._accepted_names = user_functions.list_accepted_names(function)
        required = user_functions.list_required_parameters(function)
        self._required_names = {parameter.name for parameter in required} - {*REWARD_ARGUMENTS}

    def call(
        self, arguments: Mapping[str, Any], count: int, timeout_s: float | None
    ) -> CallOutcome | Coroutine[Any, Any, CallOutcome]:
        """Call the function for `count` completions; an async one gives a coroutine.

        Main thread only.
        """
        try:
            with time_limit(timeout_s):
                # Each call has its own copies, so that a function may change them: neither other functions nor other
                # samples, which share the row of their prompt, see the change. Columns that no row has are None.
                copies: dict[str, Any] = {name: [None] * count for name in self._required_names}
                for name, value in arguments.items():
                    if self._accepted_names is None or name in self._accepted_names:
                        copies[name] = [_copy_value(element) for element in value] if isinstance(value, list) else value
                result = self._function(**copies)
            if inspect.isawaitable(result):
                return self._await_rewards(result, count, timeout_s)
            return self._convert_rewards(result, count)
        except TimeLimitPassed:
            return self._make_timeout(timeout_s)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it becomes the failure
            return self._make_failure(error)

    async def _await_rewards(self, result: Awaitable[Any], count: int, timeout_s: float | None) -> CallOutcome:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                rewards = await result
            return self._convert_rewards(rewards, count)
        except Exception as error:  # noqa: BLE001 - as in `call`
            is_late = limit.expired() and not isinstance(error, RewardError)
            return self._make_timeout(timeout_s) if is_late else self._make_failure(error)

    def _convert_rewards(self, result: Any, count: int) -> list[float | None]:
        is_list = isinstance(result, Iterable) and getattr(result, "ndim", 1) > 0
        if not is_list or isinstance(result, Mapping | Set | str | bytes):  # these have no order, or no numbers
            text = f"{self._path} returned {type(result).__name__} for {count} completions, and no list of rewards"
            raise InvalidRewardsError(text)
        rewards = list(result)
        if len(rewards) != count:
            numbers = f"{len(rewards)} reward{'' if len(rewards) == 1 else 's'}"
            raise InvalidRewardsError(f"{self._path} returned {numbers} for {count} completions")
        try:
            return [_convert_reward(reward) for reward in rewards]
        except (TypeError, ValueError) as error:
            text = f"{self._path} returned {len(rewards)} rewards for {count} completions, and among them"
            raise InvalidRewardsError(f"{text} something that is neither a number nor None: {error}") from error

    def _make_timeout(self, timeout_s: float | None) -> RewardError:
        failure = RewardError(f"{self._path} gave no rewards within reward_timeout_s={timeout_s:g} s")
        failure.is_timeout = True
        return failure

    def _make_failure(self, error: Exception) -> RewardError:
        if isinstance(error, RewardError):
            return error
        failure = RewardError(
            f"{self._path} raised {describe_error(error)} ({user_functions.find_place(error, self._owner)})"
        )
        failure.__cause__ = error
        return failure


# Columns that are not arguments: prompts and completions hold the first two, the others are reserved.
_NOT_COLUMNS = ("prompt", "completion", REFERENCE, INSTANCE, *REWARD_ARGUMENTS)


@dataclass(eq=False)
class RewardFunctionEnvironment(Environment):
    """Weighted sum of the rewards of several functions.

    A reward None is left out of the sum, as in TRL. If the prompt is a text, completions are texts; if it is a list of
    messages, each completion is a list of one assistant message. A column that a row lacks is None for it. Functions
    are called one after the other; awaitables that async functions return are then awaited together.

    With `agent_function`, an agent runs the rollouts, and its results are an argument of the functions.
    """

    functions: Mapping[str, RewardFunction]
    weights: Mapping[str, float]  # factor of each function's reward, by name of the function
    correctness: str | None  # name of the function that says what is correct, and whose None means unknown
    correct_from: float = 1.0  # reward of this function from which a response is correct
    timeout_s: float | None = None  # deadline of one call of a function; None: only the deadline of the process
    tolerant: bool = False  # a failed function counts as reward None; otherwise the rollout fails
    agent_function: user_functions.AgentFunction | None = None  # runs the rollouts, if there is one
    reads_token_ids = True

    def __post_init__(self) -> None:
        assert self.functions.keys() == self.weights.keys(), "a weight for every function"
        self.agent = self.agent_function is not None
        self._calls = {name: RewardCall(function) for name, function in self.functions.items()}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed: set[str] = set()

    def act(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any], access: ModelAccess) -> Any:
        assert self.agent_function is not None, "`agent` is true only with an agent_function"
        accepted = user_functions.list_accepted_names(self.agent_function)
        columns = {
            name: value
            for name, value in extra_env_info.items()
            if name not in (*AGENT_ARGUMENTS, INSTANCE, REFERENCE) and (accepted is None or name in accepted)
        }
        result = self.agent_function(prompt=prompt, access=access, **columns)
        return asyncio.run(_await_all([result]))[0] if inspect.isawaitable(result) else result

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Call the functions, and sum up their weighted rewards.

        RewardError: a function failed, and `tolerant` is not set; the message names function, exception and line.
        """
        scores = [EnvironmentReturn(reward=None, correct=None) for _ in requests]
        logged_metrics: defaultdict[str, list[float]] = defaultdict(list)
        arguments = self._make_arguments(requests, scores, logged_metrics)
        outcomes = self._call_functions(self.functions, arguments, len(requests))
        for name in self.functions:  # in the order of the configuration, whichever finished first
            outcome = outcomes[name]
            if isinstance(outcome, RewardError):
                outcome = self._repeat_call(name, outcome, requests, scores)
            for score, reward in zip(scores, outcome, strict=True):
                if reward is not None:
                    score.parts[name] = reward
        for score in scores:
            if score.parts:
                score.reward = sum(self.weights[name] * value for name, value in score.parts.items())
            if self.correctness in score.parts:
                score.correct = score.parts[self.correctness] >= self.correct_from
            score.metrics = {name: fmean(values) for name, values in logged_metrics.items()}
        return scores

    def _call_functions(self, names: Iterable[str], arguments: Mapping[str, Any], count: int) -> dict[str, CallOutcome]:
        outcomes: dict[str, Any] = {name: self._calls[name].call(arguments, count, self.timeout_s) for name in names}
        coroutines = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Coroutine)}
        if coroutines:
            # One loop for all calls: a client that a function keeps is bound to it.
            self._loop = self._loop or asyncio.new_event_loop()
            results = self._loop.run_until_complete(_await_all(coroutines.values()))
            outcomes |= zip(coroutines, results, strict=True)
        return outcomes

    def _repeat_call(
        self, name: str, failure: RewardError, requests: list[EnvironmentRequest], scores: list[EnvironmentReturn]
    ) -> list[float | None]:
        """Call a failed function once more, for the same responses."""
        # Never for each response by itself: rewards may depend on the other responses of the group.
        if not self.tolerant or isinstance(failure, InvalidRewardsError):
            raise failure
        outcome: CallOutcome = failure
        if not failure.is_timeout:  # a second call would take as long again
            logger.warning("%s; the function is called again for these %d responses", failure, len(requests))
            scores[0].retries += 1
            ignored_scores = [EnvironmentReturn(reward=None, correct=None) for _ in requests]  # the repetition's notes
            arguments = self._make_arguments(requests, ignored_scores, defaultdict(list))
            outcome = self._call_functions([name], arguments, len(requests))[name]
        if not isinstance(outcome, RewardError):
            return outcome
        if isinstance(outcome, InvalidRewardsError):
            raise outcome
        if name not in self._failed:
            self._failed.add(name)
            logger.warning("%s; its reward is None for such responses (on_reward_error=none)", outcome)
        for score in scores:
            score.errors += 1
        return [None] * len(requests)

    def _make_arguments(
        self, requests: list[EnvironmentRequest], scores: list[EnvironmentReturn], logged: defaultdict[str, list[float]]
    ) -> dict[str, Any]:
        """Make the keyword arguments; log_extra writes to `scores`, log_metric to `logged`."""

        def log_metric(name: str, value: float) -> None:
            logged[name].append(float(value))

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for score, value in zip(scores, values, strict=True):
                score.notes[column] = value if isinstance(value, str) else json.dumps(value, default=str)

        names = dict.fromkeys(key for request in requests for key in request.extra_env_info if key not in _NOT_COLUMNS)
        columns = {name: [request.extra_env_info.get(name) for request in requests] for name in names}
        if self.agent:
            columns[AGENT_RESULT] = [request.state for request in requests]
        ids = [request.response_ids for request in requests]
        return {
            "prompts": [request.prompt for request in requests],
            "completions": [
                request.response
                if isinstance(request.prompt, str)
                else [{"role": "assistant", "content": request.response}]
                for request in requests
            ],
            "completion_ids": [[] if response_ids is None else response_ids.tolist() for response_ids in ids],
            **columns,
            "trainer_state": requests[0].trainer_state,
            "log_metric": log_metric,
            "log_extra": log_extra,
        }


def _convert_reward(value: Any) -> float | None:
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is a text")
    reward = None if value is None else float(value)
    if reward is not None and not isfinite(reward):
        raise ValueError(f"{reward} is no reward; None says that a response has none")
    return reward


def _copy_value(value: Any) -> Any:
    is_list_of_ids = isinstance(value, list) and {*map(type, value)} <= {int}
    return value[:] if is_list_of_ids else deepcopy(value)  # deepcopy is slow for token ids


async def _await_all(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables)
