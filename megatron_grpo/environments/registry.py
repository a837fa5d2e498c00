"""Which environment a configuration's `type` names, and whether its options fit."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_grpo.config.data_schema import (
    BUILT_IN,
    REWARD_FUNCTIONS,
    DatasetConfig,
    EnvironmentConfig,
    is_model_folder,
    name_of_reward,
)
from megatron_grpo.config.errors import ConfigError, Problem, RunError, shown
from megatron_grpo.config.paths import imported
from megatron_grpo.config.schema import Config
from megatron_grpo.data.examine import examined
from megatron_grpo.data.specs import PREPARED_PROMPTS, processor_problems, task_spec
from megatron_grpo.environments.agent import RESULT, AgentEnvironment, load_agent_function
from megatron_grpo.environments.interface import Environment, EnvironmentSettings, import_folders, make_importable
from megatron_grpo.environments.reward_call import (
    RewardFunction,
    load_reward_function,
    missing_columns,
    not_callable_by_name,
)
from megatron_grpo.environments.reward_functions import Limits, RewardFunctionEnvironment
from megatron_grpo.environments.reward_model import model_problem
from megatron_grpo.weights.source import made_before_the_run

SETTINGS = "settings"
"""The parameter by which an environment's constructor asks for what it has to know of the run."""


def create_environment(
    config: EnvironmentConfig,
    settings: EnvironmentSettings | None = None,
    rewards: Mapping[str, RewardFunction] | None = None,
) -> Environment:
    """The environment that `config.type` names, made with `config.options`; imports only what that one needs.

    Args:
        config: which environment.
        settings: what it may know of the run; None: the defaults.
        rewards: by their entry in `config.reward_funcs`, the functions that are not to be imported: those that a
            script gave, and reward models.

    Raises:
        RunError: the class cannot be imported, or is no environment, or the options do not fit it.
    """
    settings = settings or EnvironmentSettings()
    make_importable(settings.import_folders)
    if config.type == REWARD_FUNCTIONS:
        given = rewards or {}
        functions = {name_of_reward(one): given.get(one) or load_reward_function(one) for one in config.reward_funcs}
        scoring = (functions, config.weights_by_function(), config.correctness_function())
        limits: Limits = {"timeout_s": config.reward_timeout_s, "tolerant": config.on_reward_error == "none"}
        if config.agent_func is None:
            return RewardFunctionEnvironment(*scoring, **limits)
        return AgentEnvironment(load_agent_function(config.agent_func), *scoring, **limits)
    kind = environment_class(config.type)
    arguments, problems = fitted_options(kind, config.options)
    if problems:
        raise RunError("; ".join(f"options.{name} {text}" for name, text in problems))
    return kind(**arguments, **({SETTINGS: settings} if SETTINGS in _parameters(kind) else {}))


def environment_class(kind: str) -> type[Environment]:
    """The class of an environment type: the name of a built-in one, or package.module:Class.

    Raises:
        RunError: there is no such class, its module fails, or it is no `Environment` with a `score` of its own.
    """
    path = BUILT_IN.get(kind, kind)
    module, _, name = path.partition(":")
    try:
        found = imported(module, name)
    except ValueError as error:
        raise RunError(str(error)) from error
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise RunError("is no subclass of megatron_grpo.environments.interface.Environment")
    if inspect.isabstract(found):
        raise RunError(f"does not define {', '.join(sorted(found.__abstractmethods__))}")
    return found


def fitted_options(kind: type[Environment], options: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Options as the constructor's annotations want them, and what is wrong with others: name and reason.

    Values are converted as those of the configuration are: "3" passes for a number, "three" does not.
    """
    parameters = {name: one for name, one in _parameters(kind).items() if name != SETTINGS}
    hints = _hints(kind)
    arguments: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for name, value in options.items():
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            known = f"did you mean {near[0]}?" if near else f"there is {', '.join(parameters) or 'none'}"
            problems.append((f"{name}={shown(value)}", f"is no option of {kind.__name__}; {known}"))
            continue
        try:
            adapter = TypeAdapter(hints.get(name, Any), config=None if _has_config(hints.get(name)) else _CONVERSION)
            arguments[name] = adapter.validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            problems.append((f"{name}={shown(value)}", f"does not fit {kind.__name__}: {reason}"))
    required = (name for name, one in parameters.items() if one.default is inspect.Parameter.empty)
    problems += [(name, f"is required by {kind.__name__}") for name in required if name not in options]
    problems += [] if problems else kind.option_problems(arguments)
    return arguments, problems


_CONVERSION = ConfigDict(coerce_numbers_to_str=True)


def _hints(kind: type[Environment]) -> dict[str, Any]:
    """Types of the constructor's parameters; of a user's class whose annotations name what is not there, none."""
    try:
        return typing.get_type_hints(kind.__init__, include_extras=True)
    except NameError:
        return {}


def _has_config(hint: Any) -> bool:
    """Whether a type brings a configuration of its own, which pydantic does not let others overrule."""
    return any(hasattr(hint, name) for name in ("__pydantic_config__", "model_config", "__dataclass_fields__"))


def _parameters(kind: type[Environment]) -> dict[str, inspect.Parameter]:
    """What the constructor can be given by keyword."""
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: one for name, one in inspect.signature(kind).parameters.items() if one.kind in by_keyword}


def check_environments(config: Config) -> None:
    """Import every class of `env` and every processor, before processes are started that would fail one by one.

    Raises:
        ConfigError: some cannot be imported or be called as they would be, or their options do not fit.
    """
    make_importable(import_folders())
    problems = list(processor_problems(config.data))
    problems += [problem for name, one in config.env.items() for problem in _problems(f"env.{name}", one, config)]
    if problems:
        raise ConfigError(problems)


def _problems(section: str, environment: EnvironmentConfig, config: Config) -> Iterator[Problem]:
    if environment.type == REWARD_FUNCTIONS:  # `check_reward_functions` looks at these
        return
    try:
        kind = environment_class(environment.type)
    except RunError as error:
        yield Problem(f"{section}.type={environment.type}", str(error))
        return
    for name, text in fitted_options(kind, environment.options)[1]:
        yield Problem(f"{section}.options.{name}", text)
    if kind.agent and not config.generation.endpoint.enabled:
        text = "has an agent, which asks the model where nobody answers; give generation.endpoint.enabled=true"
        yield Problem(f"{section}.type={environment.type}", text)
    if kind.multi_turn and config.loop.max_rollout_turns == 1:
        text = f"{section}.type={environment.type} takes several turns; give how many the model may have at most"
        yield Problem(f"{config.algorithm}.max_rollout_turns=1", text)


ColumnsOf = Callable[[str], Collection[str] | None]
"""(task name) -> names of the columns of its rows, the answer under "answer" among them; None: nobody knows yet."""


def check_reward_functions(
    config: Mapping[str, EnvironmentConfig],
    columns_of: ColumnsOf = lambda task: None,
    given: Mapping[str, RewardFunction] | None = None,
) -> None:
    """Import every reward function and agent here, and compare what it takes with what the data have.

    Args:
        config: environments by task name.
        columns_of: columns of the rows of a task; asked only where there are functions.
        given: by their entry in reward_funcs, functions that a script gave and that are not to be imported.

    Raises:
        ConfigError: some cannot be imported, or not be called with prompts, completions and the columns; or a folder
            is no reward model.
    """
    given = given or {}
    problems = [problem for name, one in config.items() for problem in _reward_problems(name, one, columns_of, given)]
    if problems:
        raise ConfigError(problems)


def _reward_problems(
    task: str, config: EnvironmentConfig, columns_of: ColumnsOf, given: Mapping[str, RewardFunction]
) -> Iterator[Problem]:
    columns = columns_of(task) if config.reward_funcs else None
    if columns is not None and config.agent_func is not None:
        columns = {*columns, RESULT}
    for entry in config.reward_funcs:
        subject = f"env.{task}.reward_funcs={entry}"
        if is_model_folder(entry):
            reason = model_problem(entry)
        else:
            try:
                function = given.get(entry) or load_reward_function(entry)
            except RunError as error:
                reason = str(error)
            else:
                reason = not_callable_by_name(entry, function)
                if reason is None and columns is not None:
                    reason = missing_columns(entry, function, columns)
        if reason is not None:
            yield Problem(subject, reason)
    if config.agent_func is not None:
        try:
            load_agent_function(config.agent_func)
        except RunError as error:
            yield Problem(f"env.{task}.agent_func={config.agent_func}", str(error))


def columns_known(config: Config, sets: Sequence[DatasetConfig] | None = None) -> Callable[[str], set[str] | None]:
    """A function of a task's name that gives the columns of its rows in some sets; None: in those of the run together.

    Its answer is None where nobody has looked at the rows: while streaming, or when a set cannot be read, which is told
    elsewhere; or when no row is for the task.
    """
    looked_at = [*config.data.training.values(), *config.data.validation.values()] if sets is None else sets

    def columns_of(task: str) -> set[str] | None:
        if config.data.streaming and sets is None:
            return None
        environments = {name: env.type for name, env in config.env.items()}
        found: set[str] = set()
        for one in looked_at:
            if made_before_the_run(config, one.path):
                assert config.prepare.name is not None
                made = PREPARED_PROMPTS[config.prepare.name]
                found |= set(made.columns) if task in made.tasks else set()
                continue
            looked = examined(one, config.data, environments)
            if looked.source is None:
                return None
            found |= looked.report.columns.get(task, set())
        if not found:
            return None
        has_answer = task_spec(config.data, task).answer_key is not None
        return found | ({"answer"} if has_answer else set())

    return columns_of
