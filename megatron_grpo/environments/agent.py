"""Rollouts whose turns a user's own function makes: a client of the model over OpenAI's interface."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.paths import imported
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, ModelAccess
from megatron_grpo.environments.reward_call import RewardFunction
from megatron_grpo.environments.reward_functions import Limits, RewardFunctionEnvironment

AgentFunction = Callable[..., Any]
"""(prompt=, access=, and each column of the row=) -> anything, or a coroutine of it."""

RESULT = "agent_result"
"""Argument of reward functions with the agent's return value for each rollout."""


class AgentEnvironment(RewardFunctionEnvironment):
    """An agent, whose rollouts reward functions score.

    Args:
        agent: makes the turns of a rollout.
        functions: as of `RewardFunctionEnvironment`, as are weights, correctness and limits.
    """

    agent = True

    def __init__(
        self,
        agent: AgentFunction,
        functions: Mapping[str, RewardFunction],
        weights: Mapping[str, float],
        correctness: str | None,
        **limits: Unpack[Limits],
    ) -> None:
        super().__init__(functions, weights, correctness, **limits)
        self._agent_function = agent

    def act(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any], access: ModelAccess) -> Any:
        columns = {name: value for name, value in extra_env_info.items() if name not in ("prompt", REFERENCE)}
        result = self._agent_function(prompt=prompt, access=access, **columns)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

    def columns(self, requests: Sequence[EnvironmentRequest]) -> dict[str, list[Any]]:
        return {**super().columns(requests), RESULT: [request.state for request in requests]}


async def _awaited(result: Any) -> Any:
    return await result


def load_agent_function(path: str) -> AgentFunction:
    """The function that an import path (package.module.function) names.

    Raises:
        RunError: there is no such module or function, its module fails, or it cannot be called as an agent.
    """
    module, _, name = path.rpartition(".")
    try:
        function: AgentFunction = imported(module, name)
    except ValueError as error:
        raise RunError(f"agent {path} {error}") from error
    if not callable(function):
        raise RunError(f"agent {path} is {type(function).__name__}, which cannot be called")
    try:
        inspect.signature(function).bind_partial(prompt="", access=None)
    except (TypeError, ValueError) as error:
        raise RunError(f"agent {path} must take prompt and access by name (or **kwargs): {error}") from error
    return function
