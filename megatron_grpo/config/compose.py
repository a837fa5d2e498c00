"""From a command line to a typed Config: Hydra composes conf/ over the schema's defaults, mistakes are collected."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_grpo.config.conversion import convert_values, find_missing_keys
from megatron_grpo.config.errors import ConfigError, Problem, to_text
from megatron_grpo.config.job import Job, read_job
from megatron_grpo.config.keys import find_key, flatten
from megatron_grpo.config.loop_schema import COUNTERPART, LOOPS, SHARED, is_foreign_to, switch_algorithm, translate_key
from megatron_grpo.config.overrides import (
    CONF_MODULE,
    RECIPES,
    VARIANTS,
    Overrides,
    build_search_override,
    list_config_groups,
    read_overrides,
    read_settings,
    search_path,
)
from megatron_grpo.config.schema import Config
from megatron_grpo.config.suggestions import describe_unknown_key


def explain_foreign_key(key: str, algorithm: str) -> str:
    """The message about a key that only the other algorithm reads."""
    advice = "; the value model is PPO's baseline" if algorithm == "ppo" else ""
    advice = f"; give {COUNTERPART[key]}" if key in COUNTERPART else advice
    return f"is for algorithm={switch_algorithm(algorithm)}, and this run has algorithm={algorithm}{advice}"


@functools.cache
def schema_defaults() -> dict[str, Any]:
    """The schema's defaults as Hydra composes over them.

    They lack the keys that GRPO and PPO share, so that such a key in the composed values has been given explicitly, and
    the environment, so that an environment chosen from conf/env replaces the default one.
    """
    tree = dataclasses.asdict(Config())
    return tree | {loop: _part(tree[loop], shared=False) for loop in LOOPS} | {"env": {}}


def unite_shared_keys(
    composed: DictConfig, algorithm: str, on_command_line: Collection[str], files: Callable[[], Sequence[str]]
) -> tuple[dict[str, str], list[Problem]]:
    """Write one value of each shared key into both loop sections: the given one, else the algorithm's default.

    A key may be given under both names, in different files or on the command line. Then the place that Hydra reads last
    decides, as it does for any other key; two values in one place are a contradiction.

    Args:
        composed: values that Hydra composed over `schema_defaults`.
        algorithm: the algorithm that runs.
        on_command_line: keys of the command line.
        files: returns the composed files of conf/ in the order in which Hydra reads them; takes a tenth of a second.

    Returns:
        The given name of each shared key that was given under the other algorithm's name, and the contradictions.
    """
    other = switch_algorithm(algorithm)
    tree = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(tree, dict)
    if not all(isinstance(tree[loop], dict) for loop in LOOPS):
        return {}, []  # a recipe with a value in place of a section is refused when types are checked
    shared = {loop: _part(tree[loop], shared=True) for loop in LOOPS}
    given = {loop: dict(flatten(shared[loop])) for loop in LOOPS}
    defaults = _part(dataclasses.asdict(getattr(Config(), algorithm)), shared=True)
    values = OmegaConf.merge(defaults, shared[other], shared[algorithm])
    written_names = {f"{algorithm}.{name}": f"{other}.{name}" for name in given[other].keys() - given[algorithm].keys()}
    problems = []
    for name, value in given[algorithm].items():
        if given[other].get(name, value) == value:
            continue
        places = (on_command_line, *(read_settings(file) for file in reversed(files())))
        setting = ([loop for loop in LOOPS if f"{loop}.{name}" in place] for place in places)
        last = next(filter(None, setting), [])
        if last == [other]:
            OmegaConf.update(values, name, given[other][name])
            written_names[f"{algorithm}.{name}"] = f"{other}.{name}"
        elif last != [algorithm]:
            one, two = (f"{loop}.{name}={to_text(given[loop][name])}" for loop in (algorithm, other))
            problems.append(Problem(one, f"is the same setting as {two}; leave one of them out"))
    for loop in LOOPS:
        OmegaConf.update(composed, loop, OmegaConf.merge(_part(tree[loop], shared=False), values), merge=False)
    return written_names, problems


def _part(section: Mapping[str, Any], shared: bool) -> dict[str, Any]:
    """The shared keys of a loop section, or its other ones."""
    return {key: value for key, value in section.items() if (key in SHARED) == shared}


# ${fifth_of:${...}} in conf/, because YAML cannot calculate; 1 for a wrong length, which is refused elsewhere.
OmegaConf.register_new_resolver(
    "fifth_of", lambda length: max(1, length // 5) if isinstance(length, int) else 1, replace=True
)


@dataclasses.dataclass(slots=True)
class Composed:
    """The typed configuration of a command line and its job, with what is wrong with it."""

    job: Job
    config: Config | None = None
    """The typed configuration; None: the values cannot be typed."""
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Given and default values, resolved, wrong ones included; empty when nothing could be composed."""
    problems: list[Problem] = dataclasses.field(default_factory=list)
    defaulted: set[str] = dataclasses.field(default_factory=set)
    """Keys of the schema that have their default because the given value is wrong."""
    written_names: dict[str, str] = dataclasses.field(default_factory=dict)
    """The given name of each shared key that was given under the other algorithm's name."""

    remarks: list[Problem] = dataclasses.field(default_factory=list)
    """Settings that are allowed and may not be intended, known once the machine is checked."""

    def require(self) -> Config:
        """The configuration; ConfigError if it has problems."""
        if self.problems:
            raise ConfigError(self.problems)
        assert self.config is not None
        return self.config

    @property
    def problem_keys(self) -> set[str]:
        """Keys that the problems name; later checks say nothing more about them."""
        return {problem.key for problem in self.problems}

    def rename_problems(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems under the names that the user gave: a job's fields, the other algorithm's keys."""
        named = []
        for problem in problems:
            field = self.job.fields.get(translate_key("grpo", problem.key))
            name = f"{self.job.file}: {field}" if field else self.written_names.get(problem.key)
            if name is not None:
                sets = f" (it sets {problem.key})" if field or find_key(name) else ""
                problem = Problem(name + problem.subject[len(problem.key) :], f"{problem.text}{sets}")
            named.append(problem)
        return named


def compose_typed(overrides: Sequence[str]) -> Composed:
    """The configuration of a command line: names, types and ranges are checked, combinations of settings are not."""
    with search_path(overrides) as (others, unfit):
        jobs = [argument for argument in others if argument.lstrip("+").startswith("job=")]
        read = read_overrides([argument for argument in others if argument not in jobs])
        composed = Composed(read_job(jobs, read.given))
        algorithm, overruled = _compose(composed, read)
        composed.config, wrong = convert_values(copy.deepcopy(composed.values), algorithm)
        composed.problems += [problem for problem in wrong if problem.key not in composed.problem_keys]
        composed.defaulted = set(filter(find_key, composed.problem_keys))
        composed.problems += [problem for problem in overruled if problem.key not in composed.problem_keys]
        if composed.config is not None:
            given = read.given | {key: to_text(value) for key, value in composed.job.settings.items()}
            if (
                not composed.problem_keys & list_config_groups().keys()
            ):  # an unknown recipe may have been meant to give them
                composed.problems += find_missing_keys(composed.values, composed.problem_keys)
            composed.problems += [
                Problem(f"{key}={value}", explain_foreign_key(key, algorithm))
                for key, value in given.items()
                if is_foreign_to(algorithm, key) and "." in key and key not in composed.problem_keys
            ]
    composed.problems[:0] = unfit
    return composed


def _compose(into: Composed, read: Overrides) -> tuple[str, list[Problem]]:
    """Compose the resolved values of a command line and its job, and collect what is wrong on the way.

    Returns the algorithm, and settings of the job that an option on the command line sets to another value.
    """
    job, environments = into.job, list_config_groups()["env"]
    accepted = [*job.environment_override(environments), *read.accepted]
    ConfigStore.instance().store("schema_defaults", schema_defaults())
    with initialize_config_module(CONF_MODULE, version_base="1.3"):
        try:
            composed = compose("config", [*build_search_override(), *accepted])
        except (HydraException, OmegaConfBaseException) as error:
            into.problems = [describe_unknown_key(name, "grpo") for name in read.unknown]
            into.problems += [*read.problems, *job.problems, _not_composed(accepted, error)]
            return "grpo", []
        algorithm = composed.get("algorithm") if composed.get("algorithm") in LOOPS else "grpo"
        into.written_names, contradictions = unite_shared_keys(
            composed, algorithm, read.given, lambda: _files(accepted)
        )
    overruled = list(_overruled(job, accepted, composed))
    into.problems = [describe_unknown_key(name, algorithm) for name in read.unknown]
    into.problems += [*read.problems, *job.problems, *contradictions, *job.apply(composed, environments)]
    into.problems += _unresolved(composed)
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    into.values = plain = {str(name): value for name, value in values.items()}
    if not any(one.startswith("~env.") for one in accepted):
        for name, environment in Config().env.items():  # for a run that names none, or rows without a task_name
            if not plain["env"] or plain["data"]["task_name"] == name:
                plain["env"].setdefault(name, {"type": environment.type})
    if any(name.startswith("data.train_sets") for name in read.given) and "data.train_path" not in read.given:
        plain["data"]["train_path"] = MISSING  # several sets replace the recipe's single one
    other = switch_algorithm(algorithm)
    if isinstance(plain[other], dict):  # the printed configuration shows a shared key once
        plain[other] = _part(plain[other], shared=False)
    return algorithm, overruled


def _files(accepted: Sequence[str]) -> list[str]:
    """The files of conf/ that Hydra composes for a command line, the last read last. Needs Hydra initialised."""
    loader = GlobalHydra.instance().config_loader()
    found = loader.compute_defaults_list("config", [*build_search_override(), *accepted], RunMode.RUN).defaults
    return [
        one.config_path
        for one in found
        if one.config_path and one.config_path.partition("/")[0] in list_config_groups()
    ]


def _overruled(job: Job, accepted: list[str], composed: DictConfig) -> Iterator[Problem]:
    """Settings of the job that contradict an option on the command line, of which a part alone would be misleading."""
    chosen = [one for one in accepted if one.partition("=")[0] in list_config_groups().keys() - {RECIPES, "env"}]
    chosen.sort(key=lambda one: one.startswith(f"{VARIANTS}="))  # Hydra reads the variant last
    said_by: dict[str, str] = {}
    for one in chosen:
        said_by |= {translate_key("grpo", key): one for key in read_settings(one.replace("=", "/", 1))}
    for key in said_by.keys() & job.settings.keys():
        value, given = job.settings[key], OmegaConf.select(composed, key)
        if given != value and str(given) != to_text(value):
            text = f"{said_by[key]} says {given}; leave one of them out, or give {key}=... on the command line"
            yield Problem(f"{key}={to_text(value)}", text)


def _not_composed(accepted: Sequence[str], error: Exception) -> Problem:
    """Hydra's error as a problem of the override that its message names, else of all overrides."""
    culprit = next((one for one in reversed(accepted) if one in str(error)), " ".join(accepted) or "conf/")
    reason = error.__cause__ or error
    return Problem(to_text(culprit.lstrip("+")), _one_line(reason))


def _unresolved(composed: DictConfig) -> list[Problem]:
    """Complaints about ${...} that lead nowhere; the values are replaced by null so that the rest can be resolved."""
    problems = []
    for name, text in _interpolations(OmegaConf.to_container(composed, resolve=False), ""):
        try:
            OmegaConf.select(composed, name)
        except OmegaConfBaseException as error:
            problems.append(Problem(f"{name}={text}", f"cannot be resolved: {_one_line(error)}"))
            OmegaConf.update(composed, name, None)
    return problems


def _interpolations(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """Dotted name and text of every value with a ${...} in it."""
    if isinstance(node, str) and "${" in node:
        yield name, node
    for part, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _interpolations(value, f"{name}.{part}" if name else str(part))


def _one_line(error: BaseException) -> str:
    """The first line of a message of Hydra or OmegaConf; the others say where it was raised."""
    return str(error).strip().splitlines()[0].strip()
