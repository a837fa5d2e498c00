"""Looks at every reward function and agent before processes are started that would fail over it one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from megatron_grpo.config.data_schema import EnvironmentConfig, is_model_folder
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.environments.agent import RESULT, load_agent_function
from megatron_grpo.environments.reward_call import (
    RewardFunction,
    load_reward_function,
    missing_columns,
    not_callable_by_name,
)
from megatron_grpo.environments.reward_model import model_problem

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
    problems = [problem for name, one in config.items() for problem in _problems(name, one, columns_of, given or {})]
    if problems:
        raise ConfigError(problems)


def _problems(
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
