"""Which environment a configuration's `type` names."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_grpo.config.data_schema import EnvironmentConfig, name_of_reward
from megatron_grpo.environments.agent import AgentEnvironment, load_agent_function
from megatron_grpo.environments.interface import Environment
from megatron_grpo.environments.reward_call import RewardFunction, load_reward_function
from megatron_grpo.environments.reward_functions import Limits, RewardFunctionEnvironment


def create_environment(config: EnvironmentConfig, rewards: Mapping[str, RewardFunction] | None = None) -> Environment:
    """The environment that `config.type` names; imports only what that one needs.

    Args:
        config: type and settings.
        rewards: by their entry in `config.reward_funcs`, the functions that are not to be imported: those that a
            script gave, and reward models.

    Raises:
        ValueError: there is no such environment.
    """
    if config.type == "reward_functions":
        given = rewards or {}
        functions = {name_of_reward(one): given.get(one) or load_reward_function(one) for one in config.reward_funcs}
        scoring = (functions, config.weights_by_function(), config.correctness_function())
        limits: Limits = {"timeout_s": config.reward_timeout_s, "tolerant": config.on_reward_error == "none"}
        if config.agent_func is None:
            return RewardFunctionEnvironment(*scoring, **limits)
        return AgentEnvironment(load_agent_function(config.agent_func), *scoring, **limits)
    if config.type == "addition":
        from megatron_grpo.environments.addition import AdditionEnvironment

        return AdditionEnvironment()
    if config.type == "math":
        from megatron_grpo.environments.math_environment import MathEnvironment

        return MathEnvironment()
    raise ValueError(f'no environment of type "{config.type}"')
