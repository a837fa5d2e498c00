"""Composes a command line into a typed Config with Hydra."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_grpo.config.algorithms import (
    explain_foreign_key,
    find_algorithm,
    is_algorithm_name,
    is_foreign_to,
)
from megatron_grpo.config.conversion import convert_values, find_missing_keys, refuse_other_loops
from megatron_grpo.config.errors import ConfigError, Problem, select_first_line, to_text
from megatron_grpo.config.job import Job, read_job
from megatron_grpo.config.keys import find_key, flatten
from megatron_grpo.config.loop_names import is_shared, select_keys, translate_key, unite_shared_keys
from megatron_grpo.config.loop_schema import LOOPS
from megatron_grpo.config.overrides import (
    CONF_MODULE,
    RECIPES,
    VARIANTS,
    SortedOverrides,
    build_search_override,
    is_built_in,
    list_config_groups,
    read_overrides,
    read_settings,
    search_path,
)
from megatron_grpo.config.schema import Config
from megatron_grpo.config.suggestions import describe_unknown_key


@functools.cache
def store_schema_defaults() -> None:
    """Give Hydra the defaults over which it composes conf/, once a process."""
    ConfigStore.instance().store("schema_defaults", build_schema_defaults())  # the first of conf/config.yaml


def build_schema_defaults() -> dict[str, Any]:
    """Build the defaults over which Hydra composes conf/."""
    tree = dataclasses.asdict(Config())
    # Without the shared keys, so that one in the composed values was set explicitly; without an environment, so that
    # one of conf/env replaces the default; and without a name, which is the algorithm's where no recipe has one.
    own_keys = {loop: select_keys(dataclasses.asdict(section()), shared=False) for loop, section in LOOPS.items()}
    return tree | own_keys | {"env": {}, "name": None}


# ${fifth_of:${...}} in conf/, because YAML cannot calculate; 1 for a wrong length, which is refused elsewhere.
OmegaConf.register_new_resolver(
    "fifth_of", lambda length: max(1, length // 5) if isinstance(length, int) else 1, replace=True
)


@dataclasses.dataclass(slots=True)
class ComposedConfig:
    """The typed configuration of a command line, with its problems."""

    job: Job
    config: Config | None = None  # None: the values cannot be converted to the schema's types
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Set and default values, resolved, wrong ones included; empty when Hydra could compose nothing."""
    problems: list[Problem] = dataclasses.field(default_factory=list)
    defaulted: set[str] = dataclasses.field(default_factory=set)
    """Keys with a wrong value, which have their default in `config`."""
    conflicts: set[str] = dataclasses.field(default_factory=set)
    """Keys that are wrong, or do not fit each other or the model; other problems are of the machine."""
    written_names: dict[str, str] = dataclasses.field(default_factory=dict)
    """By shared key, the other algorithm's name under which it was set."""
    user_keys: set[str] | None = None
    """Keys that the user set, GRPO's names of shared ones; None: unknown, as in a configuration of a script."""
    remarks: list[Problem] = dataclasses.field(default_factory=list)
    """Settings that are allowed but may not be intended; filled in once the machine is checked."""

    def require(self) -> Config:
        """Return the configuration; raise ConfigError if it has problems."""
        if self.problems:
            raise ConfigError(self.problems)
        assert self.config is not None
        return self.config

    @property
    def problem_keys(self) -> set[str]:
        """Keys that already have a problem; later checks skip them."""
        return {problem.key for problem in self.problems}

    def add_problems(self, problems: Sequence[Problem]) -> None:
        """Add problems of keys that have none yet."""
        keys = self.problem_keys
        self.problems += [problem for problem in self.rename_problems(problems) if problem.key not in keys]

    def rename_problems(self, problems: Sequence[Problem]) -> list[Problem]:
        """Name problems by the fields or keys that the user wrote."""
        renamed = []
        for problem in problems:
            field = self.job.fields.get(translate_key("grpo", problem.key))
            name = f"{self.job.file}: {field}" if field else self.written_names.get(problem.key)
            if name is not None:
                target = f" (it sets {problem.key})" if field or find_key(name) else ""
                problem = Problem(name + problem.subject[len(problem.key) :], f"{problem.text}{target}")
            renamed.append(problem)
        return renamed


def compose_typed(overrides: Sequence[str]) -> ComposedConfig:
    """Compose a command line; check names, types and ranges, not combinations."""
    with search_path(overrides) as (arguments, folder_problems):
        jobs = [argument for argument in arguments if argument.lstrip("+").startswith("job=")]
        parsed = read_overrides([argument for argument in arguments if argument not in jobs])
        composed = ComposedConfig(read_job(jobs, parsed.values))
        algorithm, overruled = _compose(composed, parsed)
        method = find_algorithm(algorithm)
        # The conversion removes wrong values from the copy; `values`, which --cfg job prints, keeps them.
        composed.config, wrong = convert_values(copy.deepcopy(composed.values), algorithm)
        composed.problems += [problem for problem in wrong if problem.key not in composed.problem_keys]
        composed.defaulted = set(filter(find_key, composed.problem_keys))
        composed.problems += [problem for problem in overruled if problem.key not in composed.problem_keys]
        if composed.config is not None:
            settings = parsed.values | {key: to_text(value) for key, value in composed.job.settings.items()}
            # An unknown recipe may have been meant to set the keys that are missing.
            if not composed.problem_keys & list_config_groups().keys():
                composed.problems += find_missing_keys(composed.values, composed.problem_keys)
            composed.problems += [
                Problem(f"{key}={value}", explain_foreign_key(key, method))
                for key, value in settings.items()
                if is_foreign_to(method, key) and not is_shared(key)
                if "." in key and key not in composed.problem_keys
            ]
    composed.problems[:0] = folder_problems
    return composed


def _compose(into: ComposedConfig, parsed: SortedOverrides) -> tuple[str, list[Problem]]:
    """Compose into `into`; return the algorithm, and problems with overruled job settings."""
    job, environments = into.job, list_config_groups()["env"]
    environment_option = [f"env={job.environment}"] if job.has_option(environments) else []
    accepted = [*environment_option, *parsed.accepted]
    store_schema_defaults()
    with initialize_config_module(CONF_MODULE, version_base="1.3"):
        try:
            composed = compose("config", [*build_search_override(), *accepted])
        except (HydraException, OmegaConfBaseException) as error:
            # Hydra's message names the override that is wrong.
            wrong_override = next((override for override in reversed(accepted) if override in str(error)), None)
            subject = to_text((wrong_override or " ".join(accepted) or "conf/").lstrip("+"))
            into.problems = [describe_unknown_key(name, "grpo") for name in parsed.unknown]
            into.problems += [*parsed.problems, *job.problems]
            into.problems.append(Problem(subject, select_first_line(error.__cause__ or error)))
            return "grpo", []
        if parsed.algorithm is not None:
            composed["algorithm"] = parsed.algorithm
        algorithm, wrong_path = _find_algorithm(composed)
        if composed["name"] is None:
            composed["name"] = find_algorithm(algorithm).name
        into.written_names, contradictions = unite_shared_keys(
            composed,
            find_algorithm(algorithm).section,
            functools.cache(lambda: [parsed.values, *map(read_settings, reversed(_list_composed_files(accepted)))]),
        )
    set_keys = {*parsed.values, *job.settings, *_list_chosen_keys(accepted)}
    into.user_keys = {translate_key("grpo", key) for key in set_keys}
    # Before the job is applied, because its settings then replace the values of the options.
    overruled = list(_find_overruled_settings(job, accepted, composed))
    into.problems = [describe_unknown_key(name, algorithm) for name in parsed.unknown]
    into.problems += [*parsed.problems, *wrong_path, *job.problems, *contradictions, *job.apply(composed, environments)]
    into.problems += _remove_unresolved(composed)
    resolved = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(resolved, dict)
    into.values = values = {str(name): value for name, value in resolved.items()}
    foreign = refuse_other_loops(values, algorithm)
    # Those of the command line are refused as they are written there, defaults included.
    into.problems += [problem for problem in foreign if is_shared(problem.key) or problem.key not in parsed.values]
    if not any(override.startswith("~env.") for override in accepted):
        # The default environment is for a run that names none, or for rows without a task_name.
        for name, environment in Config().env.items():
            if not values["env"] or values["data"]["task_name"] == name:
                values["env"].setdefault(name, {"type": environment.type})
    if any(name.startswith("data.train_sets") for name in parsed.values) and "data.train_path" not in parsed.values:
        values["data"]["train_path"] = MISSING  # several sets replace the recipe's single one
    return algorithm, overruled


def _find_algorithm(composed: DictConfig) -> tuple[str, list[Problem]]:
    """Find the composed algorithm; grpo stands for one that cannot be used."""
    name = str(composed.get("algorithm"))
    try:
        find_algorithm(name)
    except ValueError as error:
        if not is_algorithm_name(name):
            return "grpo", []  # reported when types are checked
        composed["algorithm"] = "grpo"
        return "grpo", [Problem(f"algorithm={to_text(name)}", str(error))]
    return name, []


def _list_composed_files(accepted: Sequence[str]) -> list[str]:
    """List the files of conf/ that Hydra composes, the last read last."""
    # Hydra has a loader only while it is initialised.
    loader = GlobalHydra.instance().config_loader()
    defaults = loader.compute_defaults_list("config", [*build_search_override(), *accepted], RunMode.RUN).defaults
    paths = [default.config_path for default in defaults if default.config_path]
    return [path for path in paths if path.partition("/")[0] in list_config_groups()]


def _list_chosen_keys(accepted: Sequence[str]) -> Iterator[str]:
    """List keys of chosen options and the user's recipe."""
    groups = list_config_groups()
    for name, _, option in (override.partition("=") for override in accepted):
        if name in groups and (name != RECIPES or not is_built_in(f"{name}/{option}")):
            yield from read_settings(f"{name}/{option}")


def _find_overruled_settings(job: Job, accepted: list[str], composed: DictConfig) -> Iterator[Problem]:
    """Yield the job's settings that an option on the command line contradicts."""
    # Refused: the option's name would mislead if the job silently replaced one of its keys.
    groups = list_config_groups().keys() - {RECIPES, "env"}
    options = [override for override in accepted if override.partition("=")[0] in groups]
    options.sort(key=lambda option: option.startswith(f"{VARIANTS}="))  # Hydra reads the variant last
    option_of_key: dict[str, str] = {}
    for option in options:
        option_of_key |= {translate_key("grpo", key): option for key in read_settings(option.replace("=", "/", 1))}
    for key in option_of_key.keys() & job.settings.keys():
        value, composed_value = job.settings[key], OmegaConf.select(composed, key)
        if composed_value != value and str(composed_value) != to_text(value):
            text = f"{option_of_key[key]} says {composed_value}; leave one of them out,"
            text += f" or give {key}=... on the command line"
            yield Problem(f"{key}={to_text(value)}", text)


def _remove_unresolved(composed: DictConfig) -> list[Problem]:
    """Replace each ${...} that leads nowhere by null, and report it."""
    problems = []
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    for name, value in flatten(unresolved):
        try:
            selected = OmegaConf.select(composed, name) if "${" in str(value) else None
            if isinstance(selected, ListConfig):
                OmegaConf.resolve(selected)
        except OmegaConfBaseException as error:
            problems.append(Problem(f"{name}={value}", f"cannot be resolved: {select_first_line(error)}"))
            OmegaConf.update(composed, name, None)
    return problems
