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
"""What is not passed on by name: columns that are what `prompts` and `completions` hold, and what is no column."""


class Limits(TypedDict):
    """How functions may fail."""

    timeout_s: float | None
    """Deadline of one call of a function; None: there is none but that of the process."""
    tolerant: bool
    """Whether a function that fails has no opinion, instead of the response having no score."""


@dataclass(slots=True)
class _Given:
    """What one call of the functions gives for some responses."""

    parts: list[dict[str, float]]
    """Per response, the reward of each function that had an opinion."""
    errors: list[int]
    """Per response, the functions that failed over it."""
    figures: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """What the functions logged with log_metric."""
    notes: list[dict[str, str]] = field(default_factory=list)
    """Per response, what they logged with log_extra."""


class RewardFunctionEnvironment(Environment):
    """The weighted sum of what several functions give; a function's None is left out of the sum, as in TRL.

    A prompt that is a text comes with completions that are texts; a list of messages with completions that are lists of
    one assistant message. A column that a row lacks is None there. Functions are called one after the other; what
    some give to be awaited, as coroutine functions do, is awaited together after that.

    Args:
        functions: the reward functions by name.
        weights: factor of each function's reward in the sum, by name of the function.
        correctness: name of the function whose reward above 0 makes a response correct, and whose None leaves it open;
            None: no function says it.
        timeout_s: deadline of one call of a function; None: there is none but that of the process.
        tolerant: whether a function that fails has no opinion, instead of the response having no score.
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
        """The weighted sums of what the functions give.

        Raises:
            RewardError: a function raised, took too long, or returned something other than a number (or None) for
                each completion; says which function, what it raised and where. Not if the environment is tolerant.
        """
        given = _Given([{} for _ in requests], [0] * len(requests), notes=[{} for _ in requests])
        arguments = self._arguments(requests, given)
        rewards = self._outcomes(self.functions, arguments, len(requests))
        for name in self.functions:  # in the order of the configuration, whatever finished first
            outcome = rewards[name]
            if isinstance(outcome, RewardError):
                outcome = self._one_by_one(name, outcome, requests, given)
            for parts, reward in zip(given.parts, outcome, strict=True):
                if reward is not None:
                    parts[name] = reward
        figures = {name: fmean(values) for name, values in given.figures.items()}
        samples = zip(given.parts, given.errors, given.notes, strict=True)
        return [self._total(parts, errors, figures, notes) for parts, errors, notes in samples]

    def _outcomes(self, names: Iterable[str], arguments: Mapping[str, Any], count: int) -> dict[str, Outcome]:
        """What functions give for `count` responses, or how they failed; those to be awaited are awaited together."""
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
        if self._loop is None:  # kept: a client of a server that a function opens belongs to the loop it was opened in
            self._loop = asyncio.new_event_loop()

        async def all_of_them() -> list[Outcome]:
            return await asyncio.gather(*waiting.values())

        return dict(zip(waiting, self._loop.run_until_complete(all_of_them()), strict=True))

    def _one_by_one(
        self, name: str, failure: RewardError, requests: Sequence[EnvironmentRequest], given: _Given
    ) -> list[float | None]:
        """The rewards of a function that failed over all responses together; None for each that it fails over alone."""
        if not self._tolerant:
            raise failure
        if len(requests) == 1 or failure.late:  # waiting once more for each would take as many deadlines
            given.errors[:] = [count + 1 for count in given.errors]
            return [None] * len(requests)
        rewards: list[float | None] = []
        for number, request in enumerate(requests):
            arguments = self._arguments([request], _Given([], [], notes=[{}]))
            outcome = self._outcomes([name], arguments, 1)[name]
            given.errors[number] += isinstance(outcome, RewardError)
            rewards += [None] if isinstance(outcome, RewardError) else outcome
        return rewards

    def columns(self, requests: Sequence[EnvironmentRequest]) -> dict[str, list[Any]]:
        """The columns of the rows by name, of each a list over the requests."""
        names = dict.fromkeys(key for request in requests for key in request.extra_env_info if key not in _NOT_COLUMNS)
        return {name: [request.extra_env_info.get(name) for request in requests] for name in names}

    def _arguments(self, requests: Sequence[EnvironmentRequest], given: _Given) -> dict[str, Any]:
        """What functions are called with, by keyword; what they log goes to `given`."""

        def log_metric(name: str, value: float) -> None:
            given.figures[name].append(float(value))

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for notes, value in zip(given.notes, values, strict=True):
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
