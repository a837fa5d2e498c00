"""Makes environments from the configured `type` and options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from megatron_grpo.config import function_options
from megatron_grpo.config.data_schema import BUILT_IN, REWARD_FUNCTIONS, EnvironmentConfig, parse_reward_name
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.function_options import list_parameters
from megatron_grpo.config.paths import import_object, make_importable
from megatron_grpo.environments.interface import Environment, EnvironmentSettings
from megatron_grpo.environments.reward_functions import RewardFunctionEnvironment
from megatron_grpo.environments.user_functions import RewardFunction, load_agent_function, load_reward_function

SETTINGS = "settings"  # name of the constructor parameter that receives the settings of the run


def create_environment(
    config: EnvironmentConfig,
    settings: EnvironmentSettings | None = None,
    rewards: Mapping[str, RewardFunction] | None = None,
) -> Environment:
    """Make the configured environment; imports only the modules that it needs.

    `rewards` are functions of a script and clients of reward models, by their entry in `config.reward_funcs`. RunError:
    the class cannot be imported or is not an environment, or the options do not fit.
    """
    settings = settings or EnvironmentSettings()
    make_importable(settings.import_folders)
    if config.type == REWARD_FUNCTIONS:
        rewards = rewards or {}
        functions = {
            parse_reward_name(entry): rewards.get(entry) or load_reward_function(entry) for entry in config.reward_funcs
        }
        return RewardFunctionEnvironment(
            agent_function=None if config.agent_func is None else load_agent_function(config.agent_func),
            functions=functions,
            weights=config.function_weights,
            correctness=config.correct_func,
            correct_from=config.correct_from,
            timeout_s=config.reward_timeout_s,
            tolerant=config.on_reward_error == "none",
        )
    environment = import_environment_class(config.type)
    arguments, problems = convert_options(environment, config.options)
    if problems:
        raise RunError("; ".join(f"options.{name} {text}" for name, text in problems))
    return environment(**arguments, **({SETTINGS: settings} if SETTINGS in list_parameters(environment) else {}))


def import_environment_class(kind: str) -> type[Environment]:
    """Import the class of a built-in type, or of package.module:Class.

    RunError: the class does not exist, its module fails, or it is no `Environment` that defines `score`.
    """
    module, _, name = BUILT_IN.get(kind, kind).partition(":")
    try:
        environment = import_object(module, name)
    except ValueError as error:
        raise RunError(str(error)) from error
    if not (inspect.isclass(environment) and issubclass(environment, Environment)):
        text = "is not a subclass of megatron_grpo.environments.interface.Environment"
        if hasattr(environment, "remote"):
            text += "; take ray.remote away: the run starts the processes of environments itself (env.NAME.num_workers)"
        elif hasattr(environment, "global_post_process_and_metrics"):
            text += "; docs/python.md says how to carry an environment of NeMo RL over"
        raise RunError(text)
    if inspect.isabstract(environment):
        raise RunError(f"does not define {', '.join(sorted(environment.__abstractmethods__))}")
    return environment


def convert_options(
    environment: type[Environment], options: dict[str, Any]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Convert options to the types of the constructor's parameters; return problems too."""
    parameters = {name: parameter for name, parameter in list_parameters(environment).items() if name != SETTINGS}
    arguments, problems = function_options.convert_options(environment.__name__, parameters, options)
    problems += [] if problems else environment.option_problems(arguments)
    return arguments, problems
