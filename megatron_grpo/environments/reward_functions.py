"""Rewards from a user's own functions, with the signature that TRL's GRPOTrainer calls them by."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.interfaces import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import EnvironmentInterface

RewardFunction = Callable[..., Sequence[float | None]]
"""(prompts=, completions=, and each column of the data=) -> one reward per completion, None where it has no opinion."""

_NOT_COLUMNS = ("prompt", "completion", "prompts", "completions", REFERENCE)
"""What is not passed on by name: columns that are what `prompts` and `completions` hold, and what is no column."""


class RewardFunctionEnvironment(EnvironmentInterface):
    """The weighted sum of what several functions give; a function's None is left out of the sum, as in TRL.

    A prompt that is a text comes with completions that are texts; a list of messages with completions that are lists of
    one assistant message. A column that a row lacks is None there.

    Args:
        functions: by name.
        weights: of the same names.
        correctness: name of the function whose reward above 0 makes a response correct, and whose None leaves it open;
            None: no function says it.
    """

    def __init__(
        self, functions: Mapping[str, RewardFunction], weights: Mapping[str, float], correctness: str | None
    ) -> None:
        assert functions.keys() == weights.keys(), "a weight for every function"
        self.functions, self.weights, self.correctness = functions, weights, correctness

    def step(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """See `EnvironmentInterface`. What a function raises is its author's to see, and goes through.

        Raises:
            ValueError: a function returned another number of rewards than it got completions.
        """
        parts: list[dict[str, float]] = [{} for _ in requests]
        arguments = _arguments(requests)
        for name, function in self.functions.items():
            rewards = list(function(**arguments))
            if len(rewards) != len(requests):
                raise ValueError(f"reward function {name} gave {len(rewards)} rewards for {len(requests)} completions")
            for given, reward in zip(parts, rewards, strict=True):
                if reward is not None:
                    given[name] = float(reward)
        return [self._total(given) for given in parts]

    def _total(self, parts: dict[str, float]) -> EnvironmentReturn:
        reward = sum(self.weights[name] * value for name, value in parts.items()) if parts else None
        judged = None if self.correctness is None else parts.get(self.correctness)
        return EnvironmentReturn(reward=reward, correct=None if judged is None else judged > 0, parts=parts)


def _arguments(requests: Sequence[EnvironmentRequest]) -> dict[str, list[Any]]:
    columns = dict.fromkeys(key for request in requests for key in request.extra_env_info if key not in _NOT_COLUMNS)
    return {
        "prompts": [request.prompt for request in requests],
        "completions": [_completion(request) for request in requests],
        **{key: [request.extra_env_info.get(key) for request in requests] for key in columns},
    }


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
