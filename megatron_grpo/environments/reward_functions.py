"""Rewards from a user's own functions, called as TRL's GRPOTrainer calls them, and turns from a user's own agent."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ModelAccess
from megatron_grpo.environments.interface import Environment
from megatron_grpo.environments.reward_call import (
    PASSED,
    Outcome,
    RewardCall,
    RewardError,
    RewardFunction,
    load_callable,
)

logger = logging.getLogger(__name__)

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
