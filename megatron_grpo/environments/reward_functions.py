"""Rewards from a user's own functions, with the signature that TRL's GRPOTrainer calls them by."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.interfaces import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment

RewardFunction = Callable[..., Sequence[float | None]]
"""(prompts=, completions=, and each column of the data=) -> one reward per completion, None where it has no opinion."""

_NOT_COLUMNS = ("prompt", "completion", "prompts", "completions", REFERENCE)
"""What is not passed on by name: columns that are what `prompts` and `completions` hold, and what is no column."""


class RewardFunctionEnvironment(Environment):
    """The weighted sum of what several functions give; a function's None is left out of the sum, as in TRL.

    A prompt that is a text comes with completions that are texts; a list of messages with completions that are lists of
    one assistant message. A column that a row lacks is None there.

    Args:
        functions: the reward functions by name.
        weights: factor of each function's reward in the sum, by name of the function.
        correctness: name of the function whose reward above 0 makes a response correct, and whose None leaves it open;
            None: no function says it.
    """

    def __init__(
        self, functions: Mapping[str, RewardFunction], weights: Mapping[str, float], correctness: str | None
    ) -> None:
        assert functions.keys() == weights.keys(), "a weight for every function"
        self.functions, self.weights, self.correctness = functions, weights, correctness

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """The weighted sums of what the functions give.

        Raises:
            RunError: a function raised, or returned something other than a number (or None) for each completion; says
                which function, what it raised and where.
        """
        parts: list[dict[str, float]] = [{} for _ in requests]
        arguments = self.arguments(requests)
        for name, function in self.functions.items():
            for given, reward in zip(parts, _rewards(function, arguments, len(requests)), strict=True):
                if reward is not None:
                    given[name] = reward
        return [self._total(given) for given in parts]

    def arguments(self, requests: list[EnvironmentRequest]) -> dict[str, list[Any]]:
        """What the functions are called with, by name, of each a list over the requests."""
        columns = dict.fromkeys(
            key for request in requests for key in request.extra_env_info if key not in _NOT_COLUMNS
        )
        return {
            "prompts": [request.prompt for request in requests],
            "completions": [_completion(request) for request in requests],
            **{key: [request.extra_env_info.get(key) for request in requests] for key in columns},
        }

    def _total(self, parts: dict[str, float]) -> EnvironmentReturn:
        reward = sum(self.weights[name] * value for name, value in parts.items()) if parts else None
        judged = None if self.correctness is None else parts.get(self.correctness)
        return EnvironmentReturn(reward=reward, correct=None if judged is None else judged > 0, parts=parts)


def _rewards(function: RewardFunction, arguments: dict[str, list[Any]], count: int) -> list[float | None]:
    """What a function gives for `count` completions; RunError when it raises or gives something else than rewards."""
    path = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
    try:
        given = list(function(**arguments))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        raise RunError(f"{path} raised {type(error).__name__}: {error} ({where})") from error
    if len(given) != count:
        raise RunError(f"{path} gave {len(given)} rewards for {count} completions")
    try:
        return [None if reward is None else float(reward) for reward in given]
    except (TypeError, ValueError) as error:
        raise RunError(f"{path} gave something that is neither a number nor None: {error}") from error


def _completion(request: EnvironmentRequest) -> str | list[dict[str, str]]:
    if isinstance(request.prompt, str):
        return request.response
    return [{"role": "assistant", "content": request.response}]


def load_reward_function(path: str) -> RewardFunction:
    """The function that an import path (package.module.function) names.

    Raises:
        RunError: there is no such module or function, its module fails, or it cannot be called with prompts and
            completions.
    """
    module, _, name = path.rpartition(".")
    try:
        function: RewardFunction = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"reward function {path} cannot be imported: {reason}") from error
    if not callable(function):
        raise RunError(f"reward function {path} is {type(function).__name__}, which cannot be called")
    try:
        inspect.signature(function).bind_partial(prompts=[], completions=[])
    except (TypeError, ValueError) as error:
        text = f"reward function {path} must take prompts and completions by name (or **kwargs): {error}"
        raise RunError(text) from error
    return function
