"""Which environment a configuration's `type` names."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.environments.agent import AgentEnvironment, load_agent_function
from megatron_grpo.environments.interface import Environment
from megatron_grpo.environments.reward_functions import RewardFunctionEnvironment, load_reward_function


def create_environment(config: EnvironmentConfig) -> Environment:
    """The environment that `config.type` names; imports only what that one needs.

    Raises:
        ValueError: there is no such environment.
    """
    if config.type == "reward_functions":
        functions = {path.rpartition(".")[2]: load_reward_function(path) for path in config.reward_funcs}
        scoring = (functions, config.weights_by_function(), config.correctness_function())
        if config.agent_func is None:
            return RewardFunctionEnvironment(*scoring)
        return AgentEnvironment(load_agent_function(config.agent_func), *scoring)
    if config.type == "addition":
        from megatron_grpo.environments.addition import AdditionEnvironment

        return AdditionEnvironment()
    if config.type == "math":
        from megatron_grpo.environments.math_environment import MathEnvironment

        return MathEnvironment()
    raise ValueError(f'no environment of type "{config.type}"')


def check_reward_functions(config: Mapping[str, EnvironmentConfig]) -> None:
    """Import every reward function and agent here, before processes are started that would fail one by one.

    Raises:
        ConfigError: some cannot be imported, or not be called with prompts and completions.
    """
    problems = []
    for name, environment in config.items():
        for path in environment.reward_funcs:
            try:
                load_reward_function(path)
            except RunError as error:
                problems.append(Problem(f"env.{name}.reward_funcs={path}", str(error)))
        if environment.agent_func is not None:
            try:
                load_agent_function(environment.agent_func)
            except RunError as error:
                problems.append(Problem(f"env.{name}.agent_func={environment.agent_func}", str(error)))
    if problems:
        raise ConfigError(problems)
