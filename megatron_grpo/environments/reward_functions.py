"""Rewards from a user's own functions, with the signature that TRL's GRPOTrainer calls them by."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypedDict

from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment
from megatron_grpo.environments.reward_call import PASSED, Outcome, RewardCall, RewardError, RewardFunction

_NOT_COLUMNS = ("prompt", "completion", REFERENCE, *PASSED)
"""Names that are not passed on as columns: prompts and completions hold two of them, the others are no columns."""


class Limits(TypedDict):
    """Time limit of reward functions, and the handling of their failures."""

    timeout_s: float | None
    """Deadline of one call of a function; None: only the deadline of the process holds."""
    tolerant: bool
    """Whether a function that fails counts as None; else the response has no score."""


@dataclass(slots=True)
class _Results:
    """Results of the functions for some responses."""

    parts: list[dict[str, float]]
    """Per response, the rewards by function; functions that returned None are absent."""
    errors: list[int]
    """Per response, the number of functions that failed."""
    figures: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Values passed to log_metric, by name."""
    notes: list[dict[str, str]] = field(default_factory=list)
    """Per response, values passed to log_extra, by column."""


class RewardFunctionEnvironment(Environment):
    """The weighted sum of several functions' rewards; a function's None is left out of the sum, as in TRL.

    A prompt that is a text comes with completions that are texts; a list of messages with completions that are lists of
    one assistant message. A column that a row lacks is None there. Functions are called one after the other; the
    awaitables that async functions return are then awaited together.

    Args:
        functions: the reward functions by name.
        weights: factor of each function's reward in the sum, by name of the function.
        correctness: name of the function whose reward above 0 makes a response correct, and whose None leaves it open;
            None: no function says it.
        timeout_s: deadline of one call of a function; None: only the deadline of the process holds.
        tolerant: whether a function that fails counts as None; else the response has no score.
    """

    reads_token_ids = True

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        weights: Mapping[str, float],
        correctness: str | None,
        *,
        timeout_s: float | None = None,
        tolerant: bool = False,
    ) -> None:
        assert functions.keys() == weights.keys(), "a weight for every function"
        self.functions, self.weights, self.correctness = functions, weights, correctness
        self._calls = {name: RewardCall.of(function) for name, function in functions.items()}
        self._timeout_s, self._tolerant = timeout_s, tolerant
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """The weighted sums of the functions' rewards.

        Raises:
            RewardError: a function raised, took too long, or returned something other than a number (or None) for
                each completion; says which function, what it raised and where. Not if the environment is tolerant.
        """
        results = _Results([{} for _ in requests], [0] * len(requests), notes=[{} for _ in requests])
        arguments = self._arguments(requests, results)
        rewards = self._outcomes(self.functions, arguments, len(requests))
        for name in self.functions:  # in the order of the configuration, whatever finished first
            outcome = rewards[name]
            if isinstance(outcome, RewardError):
                outcome = self._one_by_one(name, outcome, requests, results)
            for parts, reward in zip(results.parts, outcome, strict=True):
                if reward is not None:
                    parts[name] = reward
        figures = {name: fmean(values) for name, values in results.figures.items()}
        samples = zip(results.parts, results.errors, results.notes, strict=True)
        return [self._total(parts, errors, figures, notes) for parts, errors, notes in samples]

    def _outcomes(self, names: Iterable[str], arguments: Mapping[str, Any], count: int) -> dict[str, Outcome]:
        """Rewards or failure of each function for `count` responses; async functions run concurrently."""
        attempts = {name: self._calls[name].attempt(arguments, count, self._timeout_s) for name in names}
        outcomes: dict[str, Outcome] = {}
        waiting: dict[str, Coroutine[Any, Any, Outcome]] = {}
        for name, one in attempts.items():
            if isinstance(one, Coroutine):
                waiting[name] = one
            else:
                outcomes[name] = one
        return outcomes | self._together(waiting)

    def _together(self, waiting: Mapping[str, Coroutine[Any, Any, Outcome]]) -> dict[str, Outcome]:
        if not waiting:
            return {}
        if self._loop is None:  # one for all calls: a client opened by a function belongs to the loop it was opened in
            self._loop = asyncio.new_event_loop()

        async def all_of_them() -> list[Outcome]:
            return await asyncio.gather(*waiting.values())

        return dict(zip(waiting, self._loop.run_until_complete(all_of_them()), strict=True))

    def _one_by_one(
        self, name: str, failure: RewardError, requests: Sequence[EnvironmentRequest], results: _Results
    ) -> list[float | None]:
        """Call a function that failed for all responses together once for each; None where it fails again."""
        if not self._tolerant:
            raise failure
        if len(requests) == 1 or failure.timed_out:  # calling it for each would take as many deadlines
            results.errors[:] = [count + 1 for count in results.errors]
            return [None] * len(requests)
        rewards: list[float | None] = []
        for number, request in enumerate(requests):
            arguments = self._arguments([request], _Results([], [], notes=[{}]))
            outcome = self._outcomes([name], arguments, 1)[name]
            results.errors[number] += isinstance(outcome, RewardError)
            rewards += [None] if isinstance(outcome, RewardError) else outcome
        return rewards

    def columns(self, requests: Sequence[EnvironmentRequest]) -> dict[str, list[Any]]:
        """The columns of the rows by name, each a list with a value per request."""
        names = dict.fromkeys(key for request in requests for key in request.extra_env_info if key not in _NOT_COLUMNS)
        return {name: [request.extra_env_info.get(name) for request in requests] for name in names}

    def _arguments(self, requests: Sequence[EnvironmentRequest], results: _Results) -> dict[str, Any]:
        """Keyword arguments of the functions; values that they log go to `results`."""

        def log_metric(name: str, value: float) -> None:
            results.figures[name].append(float(value))

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for notes, value in zip(results.notes, values, strict=True):
                notes[column] = value if isinstance(value, str) else json.dumps(value, default=str)

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

    def _total(
        self, parts: dict[str, float], errors: int, figures: dict[str, float], notes: dict[str, str]
    ) -> EnvironmentReturn:
        reward = sum(self.weights[name] * value for name, value in parts.items()) if parts else None
        judged = None if self.correctness is None else parts.get(self.correctness)
        correct = None if judged is None else judged > 0
        return EnvironmentReturn(reward, correct, parts, errors=errors, metrics=figures, notes=notes)


def _completion(request: EnvironmentRequest) -> str | list[dict[str, str]]:
    if isinstance(request.prompt, str):
        return request.response
    return [{"role": "assistant", "content": request.response}]
