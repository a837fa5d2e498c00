"""Checks of environments, processors and reward functions before processes start, which would fail one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_grpo.config.data_schema import REWARD_FUNCTIONS, DatasetConfig, EnvironmentConfig, is_model_folder
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.rows import examine_set
from megatron_grpo.data.specs import (
    PREPARED_PROMPTS,
    ROW_FORMS,
    find_processor_name,
    find_processor_problems,
    make_task_spec,
)
from megatron_grpo.environments.interface import list_import_folders, make_importable
from megatron_grpo.environments.registry import convert_options, import_environment_class
from megatron_grpo.environments.reward_model import find_model_problem
from megatron_grpo.environments.user_functions import (
    AGENT_RESULT,
    RewardFunction,
    check_parameters,
    load_agent_function,
    load_reward_function,
)
from megatron_grpo.models.source import is_made_before_run


def check_scoring(
    config: Config,
    sets: Sequence[DatasetConfig] | None = None,
    rewards: Mapping[str, RewardFunction] | None = None,
) -> None:
    """Import every environment, processor, reward function and agent, and check options, parameters and data columns.

    Args:
        config: environments, processors and data.
        sets: sets of prompts whose responses are scored; None: the training and validation sets.
        rewards: reward functions passed by a script, by their entry in reward_funcs; these are not imported.

    Raises:
        ConfigError: a class or function cannot be imported or called, or its options or parameters do not fit; or a
            folder is not a reward model.
    """
    make_importable(list_import_folders())
    problems = list(find_processor_problems(config.data))
    problems += [problem for name, one in config.env.items() for problem in _problems(f"env.{name}", one, config)]
    if not problems:  # reward functions may need the modules that these checks import
        problems = [problem for name in config.env for problem in _column_problems(config, name, sets)]
        problems += [problem for name in config.env for problem in _reward_problems(config, name, sets, rewards or {})]
    if problems:
        raise ConfigError(problems)


def _problems(section: str, environment: EnvironmentConfig, config: Config) -> Iterator[Problem]:
    if environment.type == REWARD_FUNCTIONS:  # `_reward_problems` checks these
        return
    try:
        kind = import_environment_class(environment.type)
    except RunError as error:
        yield Problem(f"{section}.type={environment.type}", str(error))
        return
    for name, text in convert_options(kind, environment.options)[1]:
        yield Problem(f"{section}.options.{name}", text)
    if kind.agent and not config.generation.endpoint.enabled:
        text = "has an agent, which calls the model at the endpoint; give generation.endpoint.enabled=true"
        yield Problem(f"{section}.type={environment.type}", text)
    if kind.multi_turn and config.training_loop.max_rollout_turns == 1:
        text = f"{section}.type={environment.type} takes several turns; give how many the model may have at most"
        yield Problem(f"{config.algorithm}.max_rollout_turns=1", text)


def _column_problems(config: Config, task: str, sets: Sequence[DatasetConfig] | None) -> Iterator[Problem]:
    """Columns that the environment's class needs and some rows lack, as far as rows are read before the run."""
    kind = config.env[task].type
    needed = () if kind == REWARD_FUNCTIONS else import_environment_class(kind).needs_columns
    is_own = find_processor_name(config.data, task) not in {None, *ROW_FORMS}  # it may add columns
    if not needed or is_own or (config.data.streaming and sets is None):
        return
    for one in _sets(config, sets):
        if is_made_before_run(config, one.path):
            continue
        columns = examine_set(one, config.data, _types(config)).common_columns.get(task)
        missing = [] if columns is None else [name for name in needed if name not in columns]
        if missing:
            text = f"needs the column {', '.join(missing)}, which rows of {one.path} lack; all have"
            yield Problem(f"env.{task}.type={kind}", f"{text} {', '.join(sorted(columns or ())) or 'none'}")


def _sets(config: Config, sets: Sequence[DatasetConfig] | None) -> Sequence[DatasetConfig]:
    return [*config.data.training_sets.values(), *config.data.validation_sets.values()] if sets is None else sets


def _types(config: Config) -> dict[str, str]:
    return {name: environment.type for name, environment in config.env.items()}


def _reward_problems(
    config: Config, task: str, sets: Sequence[DatasetConfig] | None, rewards: Mapping[str, RewardFunction]
) -> Iterator[Problem]:
    environment = config.env[task]
    columns = _columns(config, sets, task) if environment.reward_funcs else None
    if columns is not None and environment.agent_func is not None:
        columns.add(AGENT_RESULT)
    for entry in environment.reward_funcs:
        subject = f"env.{task}.reward_funcs={entry}"
        if is_model_folder(entry):
            reason = find_model_problem(entry)
            if reason is not None:
                yield Problem(subject, reason)
            continue
        try:
            check_parameters(entry, rewards.get(entry) or load_reward_function(entry), columns)
        except RunError as error:
            yield Problem(subject, str(error))
    if environment.agent_func is not None:
        try:
            load_agent_function(environment.agent_func)
        except RunError as error:
            yield Problem(f"env.{task}.agent_func={environment.agent_func}", str(error))


def _columns(config: Config, sets: Sequence[DatasetConfig] | None, task: str) -> set[str] | None:
    """Columns of a task's rows in these sets, or in the training and validation sets of the run.

    "answer" is among them if rows have a reference answer. None: the columns are unknown, because data is streamed (no
    row is read before training), a set cannot be read (the check of the data reports that), or the task has no rows.
    """
    if config.data.streaming and sets is None:
        return None
    found: set[str] = set()
    for one in _sets(config, sets):
        if is_made_before_run(config, one.path):
            assert config.prepare.name is not None
            made = PREPARED_PROMPTS[config.prepare.name]
            found |= set(made.columns) if task in made.tasks else set()
            continue
        looked = examine_set(one, config.data, _types(config))
        if looked.source is None:
            return None
        found |= looked.columns.get(task, set())
    if found and make_task_spec(config.data, task).answer_key is not None:
        found.add("answer")
    return found or None
