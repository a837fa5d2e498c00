"""Makes an environment from its configured `type` and options, which must fit its constructor."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from types import GenericAlias
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_grpo.config.data_schema import BUILT_IN, REWARD_FUNCTIONS, EnvironmentConfig, parse_reward_name
from megatron_grpo.config.errors import RunError, to_text
from megatron_grpo.config.paths import import_object
from megatron_grpo.environments.interface import Environment, EnvironmentSettings, make_importable
from megatron_grpo.environments.reward_functions import (
    AgentEnvironment,
    RewardFunction,
    RewardFunctionEnvironment,
    load_agent_function,
    load_reward_function,
)

SETTINGS = "settings"
"""Name of the constructor parameter that receives the settings of the run."""


def create_environment(
    config: EnvironmentConfig,
    settings: EnvironmentSettings | None = None,
    rewards: Mapping[str, RewardFunction] | None = None,
) -> Environment:
    """Make the environment of `config.type` with `config.options`; only its own modules are imported.

    Args:
        config: type and options of the environment, and its reward functions.
        settings: settings of the run; None: the defaults.
        rewards: reward functions of a script and clients of reward models, by their entry in `config.reward_funcs`.

    Raises:
        RunError: the class cannot be imported or is not an environment, or the options do not fit.
    """
    settings = settings or EnvironmentSettings()
    make_importable(settings.import_folders)
    if config.type == REWARD_FUNCTIONS:
        given = rewards or {}
        functions = {parse_reward_name(one): given.get(one) or load_reward_function(one) for one in config.reward_funcs}
        scoring: dict[str, Any] = {
            "functions": functions,
            "weights": config.function_weights,
            "correctness": config.correctness_function,
            "timeout_s": config.reward_timeout_s,
            "tolerant": config.on_reward_error == "none",
        }
        if config.agent_func is None:
            return RewardFunctionEnvironment(**scoring)
        return AgentEnvironment(agent_function=load_agent_function(config.agent_func), **scoring)
    kind = import_environment_class(config.type)
    arguments, problems = convert_options(kind, config.options)
    if problems:
        raise RunError("; ".join(f"options.{name} {text}" for name, text in problems))
    return kind(**arguments, **({SETTINGS: settings} if SETTINGS in _parameters(kind) else {}))


def import_environment_class(kind: str) -> type[Environment]:
    """Import the class of an environment type: the name of a built-in environment, or package.module:Class.

    Raises:
        RunError: the class does not exist, its module fails, or it is no `Environment` that defines `score`.
    """
    module, _, name = BUILT_IN.get(kind, kind).partition(":")
    try:
        found = import_object(module, name)
    except ValueError as error:
        raise RunError(str(error)) from error
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        text = "is not a subclass of megatron_grpo.environments.interface.Environment"
        raise RunError(f"{text}{_advice_on_interface(found)}")
    if inspect.isabstract(found):
        raise RunError(f"does not define {', '.join(sorted(found.__abstractmethods__))}")
    return found


def _advice_on_interface(found: Any) -> str:
    """The end of a message about a class of another framework's interface, or about an actor class."""
    if hasattr(found, "remote"):
        return "; take ray.remote away: the run starts the processes of environments itself (env.NAME.num_workers)"
    if hasattr(found, "global_post_process_and_metrics"):
        return "; docs/migrating.md says how to carry an environment of NeMo RL over"
    return ""


def convert_options(kind: type[Environment], options: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Convert options to the types of the constructor; returns the converted ones, and problems as name and reason.

    Values are converted like those of the configuration: "3" is accepted as a number, "three" is not.
    """
    parameters = {name: one for name, one in _parameters(kind).items() if name != SETTINGS}
    arguments: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for name, value in options.items():
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there is {', '.join(parameters) or 'none'}"
            problems.append((f"{name}={to_text(value)}", f"is not an option of {kind.__name__}; {advice}"))
            continue
        try:
            hint = parameters[name].annotation
            known = hint is not inspect.Parameter.empty and not isinstance(hint, str)
            in_list: Any = GenericAlias(list, hint if known else Any)
            (arguments[name],) = TypeAdapter(in_list, config=_CONVERSION).validate_python([value])
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            problems.append((f"{name}={to_text(value)}", f"does not fit {kind.__name__}: {reason}"))
    required = (name for name, one in parameters.items() if one.default is inspect.Parameter.empty)
    problems += [(name, f"is required by {kind.__name__}") for name in required if name not in options]
    problems += [] if problems else kind.option_problems(arguments)
    return arguments, problems


_CONVERSION = ConfigDict(coerce_numbers_to_str=True)
"""Configuration of the conversion; applied to a list of the type, because a type may have its own configuration."""


def _parameters(kind: type[Environment]) -> dict[str, inspect.Parameter]:
    """Constructor parameters that can be passed by keyword; annotations that cannot be resolved stay strings."""
    try:
        signature = inspect.signature(kind, eval_str=True)
    except NameError:
        signature = inspect.signature(kind)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: one for name, one in signature.parameters.items() if one.kind in by_keyword}
