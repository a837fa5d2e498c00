"""Requests to environments of reward functions, and a function that both kinds of tests call."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_grpo.data.scores import EnvironmentRequest


def length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def request(prompt: str | list[dict[str, str]], response: str, **columns: Any) -> EnvironmentRequest:
    return EnvironmentRequest(prompt=prompt, response=response, stop_reason="stop", extra_env_info=columns)


def wrapped_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """An ordinary function around another one, as many decorators make it."""

    @functools.wraps(function)
    def call(*positions: Any, **names: Any) -> Any:
        return function(*positions, **names)

    return call
