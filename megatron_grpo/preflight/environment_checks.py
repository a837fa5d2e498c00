"""Checks of the user's code: trackers, objectives, advantages, environments, processors, reward functions, agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_grpo.config.data_schema import REWARD_FUNCTIONS, DatasetConfig, is_model_folder
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.paths import make_importable
from megatron_grpo.config.schema import Config
from megatron_grpo.config.started_values import list_code_folders
from megatron_grpo.data import specs
from megatron_grpo.data.scores import AGENT_ARGUMENTS, AGENT_RESULT
from megatron_grpo.environments import user_functions as functions
from megatron_grpo.environments.registry import convert_options, import_environment_class
from megatron_grpo.environments.reward_model import find_model_problem
from megatron_grpo.observability.user_tracker import make_tracker
from megatron_grpo.preflight.data_checks import examine_dataset
from megatron_grpo.preflight.formula_checks import find_formula_problems, find_formula_remarks


def check_user_code(config: Config, rewards: Mapping[str, functions.RewardFunction] | None = None) -> Iterator[Problem]:
    """Import and check all code of the user; return remarks. ConfigError names its problems."""
    problems = find_user_code_problems(config, rewards)
    if problems:
        raise ConfigError(problems)
    return find_formula_remarks(config)


def find_user_code_problems(
    config: Config, rewards: Mapping[str, functions.RewardFunction] | None = None
) -> list[Problem]:
    """Find problems of the user's formulas, tracker, environments and reward functions."""
    problems = [*find_formula_problems(config), *_find_tracker_problems(config)]
    return problems + (find_scoring_problems(config, rewards=rewards) if config.needs_generation else [])


def _find_tracker_problems(config: Config) -> Iterator[Problem]:
    try:
        make_tracker(config.logger, list_code_folders(config))
    except RunError as error:
        setting = f"logger.tracker={config.logger.tracker}"
        yield Problem(setting, str(error).removeprefix(f"{setting} "))


def check_scoring(
    config: Config,
    sets: Sequence[DatasetConfig] | None = None,
    rewards: Mapping[str, functions.RewardFunction] | None = None,
) -> None:
    """Import all code that scores, and check its options, parameters and columns.

    Raises ConfigError if code cannot be imported or called, or does not fit, or if a folder is not a reward model.
    The arguments are those of `find_scoring_problems`.
    """
    problems = find_scoring_problems(config, sets, rewards)
    if problems:
        raise ConfigError(problems)


def find_scoring_problems(
    config: Config,
    sets: Sequence[DatasetConfig] | None = None,
    rewards: Mapping[str, functions.RewardFunction] | None = None,
) -> list[Problem]:
    """Import all code that scores, and find problems of its options, parameters and columns.

    Args:
        sets: sets of prompts whose responses are scored; None: the training and validation sets.
        rewards: reward functions passed by a script, by their entry in reward_funcs; these are not imported.
    """
    make_importable(list_code_folders(config))
    if sets is None and not config.data.streaming:  # of a stream no row is read before training
        sets = [*config.data.training_sets.values(), *config.data.validation_sets.values()]
    problems = list(specs.find_processor_problems(config.data))
    for task in config.env:
        problems += _find_class_problems(config, task)
    if not problems:  # reward functions may need the modules that these checks import
        for task in config.env:
            problems += _find_column_problems(config, task, sets)
        for task in config.env:
            problems += _find_reward_problems(config, task, sets, rewards or {})
    return problems


def _find_class_problems(config: Config, task: str) -> Iterator[Problem]:
    section, environment = f"env.{task}", config.env[task]
    if environment.type == REWARD_FUNCTIONS:  # has no class
        return
    try:
        environment_class = import_environment_class(environment.type)
    except RunError as error:
        yield Problem(f"{section}.type={environment.type}", str(error))
        return
    for name, text in convert_options(environment_class, environment.options)[1]:
        yield Problem(f"{section}.options.{name}", text)
    if environment_class.agent and not config.generation.endpoint.enabled:
        text = "has an agent, which calls the model at the endpoint; give generation.endpoint.enabled=true"
        yield Problem(f"{section}.type={environment.type}", text)
    if environment_class.multi_turn and config.loop.max_rollout_turns == 1:
        text = f"{section}.type={environment.type} takes several turns; give how many the model may have at most"
        yield Problem(f"{config.loop_name}.max_rollout_turns=1", text)


def _find_column_problems(config: Config, task: str, sets: Sequence[DatasetConfig] | None) -> Iterator[Problem]:
    kind = config.env[task].type
    needed = () if kind == REWARD_FUNCTIONS else import_environment_class(kind).needs_columns
    # A user's processor may add columns to the rows.
    may_add_columns = specs.find_processor_name(config.data, task) not in {None, *specs.ROW_FORMS}
    if not needed or may_add_columns or sets is None:
        return
    for dataset in sets:
        columns = examine_dataset(config, dataset).common_columns.get(task)
        missing = [] if columns is None else [name for name in needed if name not in columns]
        if missing:
            text = f"needs the column {', '.join(missing)}, which rows of {dataset.path} lack; all have"
            text += f" {', '.join(sorted(columns or ())) or 'none'}"
            yield Problem(f"env.{task}.type={kind}", text)


def _find_reward_problems(
    config: Config, task: str, sets: Sequence[DatasetConfig] | None, rewards: Mapping[str, functions.RewardFunction]
) -> Iterator[Problem]:
    environment = config.env[task]
    columns = _find_columns(config, sets, task) if environment.reward_funcs else None
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
            functions.check_parameters(entry, rewards.get(entry) or functions.load_reward_function(entry), columns)
        except RunError as error:
            yield Problem(subject, str(error))
    if environment.agent_func is not None:
        try:
            agent = functions.load_agent_function(environment.agent_func)
            functions.check_columns(
                f"agent {environment.agent_func}", agent, AGENT_ARGUMENTS, _find_columns(config, sets, task)
            )
        except RunError as error:
            yield Problem(f"env.{task}.agent_func={environment.agent_func}", str(error))


def _find_columns(config: Config, sets: Sequence[DatasetConfig] | None, task: str) -> set[str] | None:
    """Find the columns of a task's rows; None: they are unknown.

    "answer" is among them if rows have a reference answer. They are unknown if `sets` is None, a set cannot be read
    (the check of the data reports that), or the task has no rows.
    """
    if sets is None:
        return None
    columns: set[str] = set()
    for dataset in sets:
        report = examine_dataset(config, dataset)
        if report.source is None and not report.columns:  # the rows of prepare.name have no source yet
            return None
        columns |= report.columns.get(task, set())
    if columns and specs.make_task_spec(config.data, task).answer_key is not None:
        columns.add("answer")
    return columns or None
