"""Checks of environments, processors and reward functions before processes are started that would fail over them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from megatron_grpo.config.data_schema import REWARD_FUNCTIONS, DatasetConfig, EnvironmentConfig, is_model_folder
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.rows import examined
from megatron_grpo.data.specs import PREPARED_PROMPTS, processor_problems, task_spec
from megatron_grpo.environments.interface import import_folders, make_importable
from megatron_grpo.environments.registry import environment_class, fitted_options
from megatron_grpo.environments.reward_call import RewardFunction, check_parameters, load_reward_function
from megatron_grpo.environments.reward_functions import RESULT, load_agent_function
from megatron_grpo.environments.reward_model import model_problem
from megatron_grpo.weights.source import made_before_the_run


def check_scoring(
    config: Config,
    sets: Sequence[DatasetConfig] | None = None,
    given: Mapping[str, RewardFunction] | None = None,
) -> None:
    """`check_environments`, and `check_reward_functions` with the columns of the data.

    Args:
        config: environments, processors and data.
        sets: sets of prompts whose responses are scored; None: the training and validation sets.
        given: reward functions passed by a script, by their entry in reward_funcs; these are not imported.
    """
    check_environments(config)
    check_reward_functions(config.env, lambda task: _columns(config, sets, task), given)


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
    """Import every reward function and agent, and compare their parameters with the columns of the data.

    Args:
        config: environments by task name.
        columns_of: columns of the rows of a task; asked only where there are functions.
        given: as of `check_scoring`.

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
            if reason is not None:
                yield Problem(subject, reason)
            continue
        try:
            check_parameters(entry, given.get(entry) or load_reward_function(entry), columns)
        except RunError as error:
            yield Problem(subject, str(error))
    if config.agent_func is not None:
        try:
            load_agent_function(config.agent_func)
        except RunError as error:
            yield Problem(f"env.{task}.agent_func={config.agent_func}", str(error))


def _columns(config: Config, sets: Sequence[DatasetConfig] | None, task: str) -> set[str] | None:
    """The columns of a task's rows in these sets, or in the training and validation sets of the run.

    None: they are unknown, as while streaming, where no row is read before training; when a set cannot be read, which
    the check of the data reports; and for a task without rows.
    """
    if config.data.streaming and sets is None:
        return None
    environments = {name: env.type for name, env in config.env.items()}
    found: set[str] = set()
    for one in [*config.data.training.values(), *config.data.validation.values()] if sets is None else sets:
        if made_before_the_run(config, one.path):
            assert config.prepare.name is not None
            made = PREPARED_PROMPTS[config.prepare.name]
            found |= set(made.columns) if task in made.tasks else set()
            continue
        looked = examined(one, config.data, environments)
        if looked.source is None:
            return None
        found |= looked.columns.get(task, set())
    if found and task_spec(config.data, task).answer_key is not None:
        found.add("answer")
    return found or None
