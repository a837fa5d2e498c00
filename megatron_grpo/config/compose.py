"""Composes a command line into a typed Config with Hydra."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_grpo.config.conversion import convert_values, find_missing_keys
from megatron_grpo.config.errors import ConfigError, Problem, select_first_line, to_text
from megatron_grpo.config.job import Job, read_job
from megatron_grpo.config.keys import find_key, flatten
from megatron_grpo.config.loop_schema import COUNTERPART, LOOPS, SHARED, find_reader, is_foreign_to, translate_key
from megatron_grpo.config.overrides import (
    CONF_MODULE,
    RECIPES,
    VARIANTS,
    SortedOverrides,
    build_search_override,
    list_config_groups,
    read_overrides,
    read_settings,
    search_path,
)
from megatron_grpo.config.schema import Config
from megatron_grpo.config.suggestions import describe_unknown_key


def explain_foreign_key(key: str, algorithm: str) -> str:
    """Explain that only another algorithm reads a key."""
    advice = "; the value model is PPO's baseline" if algorithm == "ppo" else ""
    if COUNTERPART.get(key, "").startswith(f"{algorithm}."):
        advice = f"; give {COUNTERPART[key]}"
    return f"is for algorithm={find_reader(key)}, and this run has algorithm={algorithm}{advice}"


@functools.cache
def store_schema_defaults() -> None:
    """Give Hydra the defaults over which it composes conf/, once a process."""
    ConfigStore.instance().store("schema_defaults", build_schema_defaults())  # the first of conf/config.yaml


def build_schema_defaults() -> dict[str, Any]:
    """Build the defaults over which Hydra composes conf/."""
    tree = dataclasses.asdict(Config())
    # Without the shared keys, so that one in the composed values was set explicitly; and without an environment, so
    # that one of conf/env replaces the default.
    return tree | {loop: _select_keys(tree[loop], shared=False) for loop in LOOPS} | {"env": {}}


def unite_shared_keys(
    composed: DictConfig, algorithm: str, on_command_line: Collection[str], files: Callable[[], Sequence[str]]
) -> tuple[dict[str, str], list[Problem]]:
    """Write one value of each shared key into all loop sections that are read.

    The value is the one that was set, under any name, else the algorithm's default. `files` lists the composed files
    of conf/ in the order in which Hydra reads them; it takes a tenth of a second.

    Returns:
        By key, the name under which it was set, if that is another algorithm's; and the contradictions.
    """
    tree = cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=False))
    if not all(isinstance(tree[loop], dict) for loop in LOOPS):
        return {}, []  # a recipe with a value in place of a section is refused when types are checked
    loops = sorted(LOOPS, key=lambda loop: loop != algorithm)  # the algorithm's own section is the first
    set_values = {loop: dict(flatten(_select_keys(tree[loop], shared=True))) for loop in loops}
    defaults = _select_keys(dataclasses.asdict(getattr(Config(), algorithm)), shared=True)
    united = OmegaConf.merge(defaults, *(_select_keys(tree[loop], shared=True) for loop in reversed(loops)))
    setters = {
        name: [loop for loop in loops if name in set_values[loop]]
        for name in dict.fromkeys(name for loop in loops for name in set_values[loop])
    }
    # A key may be set under several names, in different files or on the command line. Then the source that Hydra reads
    # last decides, as for any other key; two values in one source are a contradiction.
    conflicts = [
        name
        for name, names in setters.items()
        if any(set_values[loop][name] != set_values[names[0]][name] for loop in names)
    ]
    sources = [on_command_line, *map(read_settings, reversed(files()))] if conflicts else []
    problems = []
    for name in conflicts:
        loops_by_source = ([loop for loop in setters[name] if f"{loop}.{name}" in source] for source in sources)
        first, *further = next(filter(None, loops_by_source), setters[name])
        loop = next((loop for loop in further if set_values[loop][name] != set_values[first][name]), None)
        if loop is not None:
            setting, contradiction = (f"{key}.{name}={to_text(set_values[key][name])}" for key in (first, loop))
            problems.append(Problem(setting, f"is the same setting as {contradiction}; leave one of them out"))
        else:
            OmegaConf.update(united, name, set_values[first][name])
            setters[name] = [first]
    shared = cast("dict[str, Any]", OmegaConf.to_container(united, resolve=False))
    # OmegaConf takes 1 ms for each section, so those that nothing reads keep their own keys alone.
    interpolations = " ".join(text for text in (str(value) for _, value in flatten(tree)) if "${" in text)
    for loop in LOOPS:
        if set_values[loop] or loop in (algorithm, "grpo") or f"{loop}." in interpolations:
            OmegaConf.update(composed, loop, _select_keys(tree[loop], shared=False) | shared, merge=False)
    written_names = {
        f"{algorithm}.{name}": f"{loop}.{name}" for name, (loop, *_) in setters.items() if loop != algorithm
    }
    return written_names, problems


def _select_keys(section: Mapping[str, Any], shared: bool) -> dict[str, Any]:
    return {key: value for key, value in section.items() if (key in SHARED) == shared}


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
                Problem(f"{key}={value}", explain_foreign_key(key, algorithm))
                for key, value in settings.items()
                if is_foreign_to(algorithm, key) and "." in key and key not in composed.problem_keys
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
        # A wrong algorithm is reported when types are checked.
        algorithm = composed.get("algorithm") if composed.get("algorithm") in LOOPS else "grpo"
        into.written_names, contradictions = unite_shared_keys(
            composed, algorithm, parsed.values, lambda: _list_composed_files(accepted)
        )
    # Before the job is applied, because its settings then replace the values of the options.
    overruled = list(_find_overruled_settings(job, accepted, composed))
    into.problems = [describe_unknown_key(name, algorithm) for name in parsed.unknown]
    into.problems += [*parsed.problems, *job.problems, *contradictions, *job.apply(composed, environments)]
    into.problems += _remove_unresolved(composed)
    resolved = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(resolved, dict)
    into.values = values = {str(name): value for name, value in resolved.items()}
    if not any(override.startswith("~env.") for override in accepted):
        # The default environment is for a run that names none, or for rows without a task_name.
        for name, environment in Config().env.items():
            if not values["env"] or values["data"]["task_name"] == name:
                values["env"].setdefault(name, {"type": environment.type})
    if any(name.startswith("data.train_sets") for name in parsed.values) and "data.train_path" not in parsed.values:
        values["data"]["train_path"] = MISSING  # several sets replace the recipe's single one
    for loop in LOOPS:  # the printed configuration shows a shared key once
        if loop != algorithm and isinstance(values[loop], dict):
            values[loop] = _select_keys(values[loop], shared=False)
    return algorithm, overruled


def _list_composed_files(accepted: Sequence[str]) -> list[str]:
    """List the files of conf/ that Hydra composes, the last read last."""
    # Hydra has a loader only while it is initialised.
    loader = GlobalHydra.instance().config_loader()
    defaults = loader.compute_defaults_list("config", [*build_search_override(), *accepted], RunMode.RUN).defaults
    paths = [default.config_path for default in defaults if default.config_path]
    return [path for path in paths if path.partition("/")[0] in list_config_groups()]


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
            text = f"{option_of_key[key]} says {composed_value}; leave one of them out, or give {key}=..."
            yield Problem(f"{key}={to_text(value)}", f"{text} on the command line")


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
