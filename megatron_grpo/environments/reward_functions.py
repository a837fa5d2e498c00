"""Rewards from a user's own functions, with the signature that TRL's GRPOTrainer calls them by."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.environments.interface import EnvironmentInterface, EnvironmentRequest, EnvironmentReturn

RewardFunction = Callable[..., Sequence[float | None]]
"""(prompts=, completions=, and each column of the data=) -> one reward per completion, None where it has no opinion."""

_NOT_COLUMNS = ("prompt", "completion", "prompts", "completions")
"""Columns that are not passed on by name: they are what `prompts` and `completions` hold."""


class RewardFunctionEnvironment(EnvironmentInterface):
    """The weighted sum of what several functions give; a function's None is left out of the sum.

    A prompt that is a text comes with completions that are texts; a list of messages with completions that are lists of
    one assistant message. A column that a row lacks is None there.

    Args:
        functions: by name.
        weights: of the same names.
        correctness: name of the function whose reward above 0 makes a response correct; None: none is.
    """

    def __init__(
        self, functions: Mapping[str, RewardFunction], weights: Mapping[str, float], correctness: str | None
    ) -> None:
        assert functions.keys() == weights.keys(), "a weight for every function"
        self.functions, self.weights, self.correctness = functions, weights, correctness

    def step(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """See `EnvironmentInterface`. What a function raises is its author's to see, and goes through.

        Raises:
            ValueError: a function returned another number of rewards than it got completions, or all of them returned
                None for some response.
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
        return [self._total(request, given) for request, given in zip(requests, parts, strict=True)]

    def _total(self, request: EnvironmentRequest, parts: dict[str, float]) -> EnvironmentReturn:
        if not parts:
            functions = ", ".join(self.functions)
            raise ValueError(f"no reward function ({functions}) gave a reward for the prompt {request.prompt!r:.200}")
        reward = sum(self.weights[name] * value for name, value in parts.items())
        correct = self.correctness is not None and parts.get(self.correctness, 0.0) > 0
        return EnvironmentReturn(reward=reward, correct=correct, parts=parts)


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
        RunError: there is no such module or function, or it cannot be called.
    """
    module, _, name = path.rpartition(".")
    try:
        function: RewardFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RunError(f"reward function {path} cannot be imported: {error}") from error
    if not callable(function):
        raise RunError(f"reward function {path} is {type(function).__name__}, which cannot be called")
    return function
