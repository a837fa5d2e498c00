"""From a command line to a typed Config: Hydra composes conf/ over the schema's defaults, mistakes are collected."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_grpo.config.errors import Problem, shown
from megatron_grpo.config.job import Job, given_keys, keys_on, split_job
from megatron_grpo.config.keys import known_key, leaves
from megatron_grpo.config.loop_schema import LOOPS, SHARED, is_foreign_to, named_for, other_than
from megatron_grpo.config.overrides import (
    CONF_MODULE,
    RECIPES,
    VARIANTS,
    config_groups,
    hydra_override,
    read_overrides,
    searched,
    settings_of,
    split_search_path,
)
from megatron_grpo.config.schema import Config
from megatron_grpo.config.suggestions import unknown_key
from megatron_grpo.config.typed import expand_homes, missing, typed


def misplaced_keys(algorithm: str, given: Mapping[str, str], already: Collection[str]) -> Iterator[Problem]:
    """Complaints about given keys that only the other algorithm reads, those given at their defaults among them.

    Args:
        algorithm: the one that runs.
        given: values, as text, by key.
        already: keys that another problem names.
    """
    for key, value in given.items():
        if is_foreign_to(algorithm, key) and "." in key and key not in already:
            yield Problem(f"{key}={value}", misplaced(key, algorithm))


def misplaced(key: str, algorithm: str) -> str:
    """The message about a key that only the algorithm reads that does not run."""
    advice = {
        "ppo.ppo_epochs": "; give grpo.num_iterations",
        "grpo.num_iterations": "; give ppo.ppo_epochs",
    }.get(key, "; the value model is PPO's baseline" if algorithm == "ppo" else "")
    return f"is for algorithm={other_than(algorithm)}, and this run has algorithm={algorithm}{advice}"


def without_shared(defaults: dict[str, Any]) -> dict[str, Any]:
    """Defaults of the schema without those of shared keys: a shared key of the composed values was given by someone."""
    return defaults | {loop: _part(defaults[loop], shared=False) for loop in LOOPS}


def unite(
    composed: DictConfig, algorithm: str, on_command_line: Collection[str], files: Callable[[], Sequence[str]]
) -> tuple[dict[str, str], list[Problem]]:
    """Write one value of each shared key into both loop sections: the given one, else the algorithm's default.

    A key may be given under both names, in different files or on the command line. Then the place that Hydra reads last
    decides, as it does for any other key; two values in one place are a contradiction.

    Args:
        composed: values that Hydra composed over defaults `without_shared`.
        algorithm: the one that runs.
        on_command_line: keys of the command line.
        files: returns the composed files of conf/, the last read last; takes a tenth of a second.

    Returns:
        The name that each shared key was given under, where that is the other algorithm's, and the contradictions.
    """
    other = other_than(algorithm)
    tree = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(tree, dict)
    if not all(isinstance(tree[loop], dict) for loop in LOOPS):
        return {}, []  # a recipe that has a value in the place of a section is refused with the types
    shared = {loop: _part(tree[loop], shared=True) for loop in LOOPS}
    given = {loop: dict(leaves(shared[loop])) for loop in LOOPS}
    defaults = _part(dataclasses.asdict(getattr(Config(), algorithm)), shared=True)
    values = OmegaConf.merge(defaults, shared[other], shared[algorithm])
    given_as = {f"{algorithm}.{name}": f"{other}.{name}" for name in given[other].keys() - given[algorithm].keys()}
    problems = []
    for name in given[algorithm]:
        if given[other].get(name, given[algorithm][name]) == given[algorithm][name]:
            continue
        last = _last_given(name, on_command_line, files)
        if last is None:
            one, two = (f"{loop}.{name}={shown(given[loop][name])}" for loop in (algorithm, other))
            problems.append(Problem(one, f"is the same setting as {two}; leave one of them out"))
        elif last == other:
            OmegaConf.update(values, name, given[other][name])
            given_as[f"{algorithm}.{name}"] = f"{other}.{name}"
    for loop in LOOPS:
        OmegaConf.update(composed, loop, OmegaConf.merge(_part(tree[loop], shared=False), values), merge=False)
    return given_as, problems


def _part(section: Mapping[str, Any], shared: bool) -> dict[str, Any]:
    """The shared keys of a loop section, or its other ones."""
    return {key: value for key, value in section.items() if (key in SHARED) == shared}


def _last_given(name: str, on_command_line: Collection[str], files: Callable[[], Sequence[str]]) -> str | None:
    """The algorithm under whose name the last place that sets a key sets it; None: that place uses both names."""

    def places() -> Iterator[Collection[str]]:
        yield on_command_line
        yield from (settings_of(file) for file in reversed(files()))

    for place in places():
        used = [loop for loop in LOOPS if f"{loop}.{name}" in place]
        if used:
            return used[0] if len(used) == 1 else None
    return None


DEFAULT_ENVIRONMENT = {name: {"type": environment.type} for name, environment in Config().env.items()}
"""The environments of a run that names none."""


def _fifth_of(length: Any) -> int:
    """${fifth_of:${...}} in conf/, because YAML cannot calculate; 1 for a wrong length, which is refused elsewhere."""
    return max(1, length // 5) if isinstance(length, int) else 1


OmegaConf.register_new_resolver("fifth_of", _fifth_of, replace=True)


@dataclasses.dataclass(slots=True)
class _Values:
    """The values of a command line and its job, before they are typed."""

    plain: dict[str, Any]
    """Resolved, as plain containers; required keys may still be "???". Empty: nothing could be composed."""
    algorithm: str
    problems: list[Problem]
    overruled: list[Problem] = dataclasses.field(default_factory=list)
    """Settings of the job that an option on the command line sets to another value."""
    given_as: dict[str, str] = dataclasses.field(default_factory=dict)
    """The name that a key of the algorithm was given under, where that is the other algorithm's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Composed:
    """The typed configuration of a command line and its job, before it is checked as a whole."""

    config: Config | None
    """None: the values cannot be typed."""
    values: dict[str, Any]
    """Given and default values, resolved, wrong ones included; empty when nothing could be composed."""
    job: Job
    problems: list[Problem]
    already: set[str]
    """Keys that the problems name; later checks say nothing more about them."""
    defaulted: set[str]
    """Keys of the schema that have their default because the given value is wrong."""
    given_as: dict[str, str]
    """The name that a key of the algorithm was given under, where that is the other algorithm's."""

    def named(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems under the names that the user gave: a job's fields, the other algorithm's keys."""
        return [self._named(problem) for problem in self.job.named(problems)]

    def _named(self, problem: Problem) -> Problem:
        name = self.given_as.get(problem.key)
        if name is None:
            return problem
        sets = f" (it sets {problem.key})" if known_key(name) else ""
        return Problem(name + problem.subject[len(problem.key) :], f"{problem.text}{sets}")


def compose_typed(overrides: Sequence[str]) -> Composed:
    """The configuration of a command line, with names, types and ranges checked but not yet how its parts fit."""
    added, others, unfit = split_search_path(overrides)
    with searched(added):
        composed = _compose_typed(others, added)
    composed.problems[:0] = unfit
    return composed


def _compose_typed(overrides: Sequence[str], added: Sequence[Path]) -> Composed:
    job, arguments = split_job(overrides)
    values = _composed(job, arguments, added)
    problems, plain = values.problems, copy.deepcopy(values.plain)
    config, wrong = typed(values.plain, values.algorithm)
    unresolved = {problem.key for problem in problems}
    problems += [problem for problem in wrong if problem.key not in unresolved]
    already = {problem.key for problem in problems}
    defaulted = {key for key in already if known_key(key)}
    problems += [problem for problem in values.overruled if problem.key not in already]
    if config is not None:
        if not already & config_groups().keys():  # a recipe that was not found would have given what is missing
            problems += missing(values.plain, already)
        misplaced = list(misplaced_keys(config.algorithm, given_keys(job, arguments), already))
        already |= {problem.key for problem in misplaced}
        problems += misplaced
    return Composed(config, plain, job, problems, already, defaulted, values.given_as)


def _composed(job: Job, arguments: list[str], added: Sequence[Path]) -> _Values:
    """The resolved values, and what was wrong on the way."""
    environments = config_groups()["env"]
    read = read_overrides([*job.environment_override(environments), *arguments])
    _store_defaults()
    with initialize_config_module(CONF_MODULE, version_base="1.3"):
        try:
            composed = compose("config", [*hydra_override(added), *read.accepted])
        except (HydraException, OmegaConfBaseException) as error:
            problems = [*read.problems, *job.problems, _not_composed(read.accepted, error)]
            return _Values({}, "grpo", [*(unknown_key(name, "grpo") for name in read.unknown), *problems])
        algorithm = composed.get("algorithm") if composed.get("algorithm") in LOOPS else "grpo"
        given_as, contradictions = unite(
            composed, algorithm, keys_on(arguments), lambda: _files([*hydra_override(added), *read.accepted])
        )
    problems = [*(unknown_key(name, algorithm) for name in read.unknown), *read.problems, *job.problems]
    overruled = list(_overruled(job, read.accepted, composed))
    problems += contradictions
    problems += job.apply(composed, environments)
    problems += _unresolved(composed)
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    plain = {str(name): value for name, value in values.items()}
    if not any(argument.startswith("~env.") for argument in arguments):
        _add_default_environment(plain)
    _choose_training(plain, keys_on(arguments))
    other = other_than(algorithm)
    if isinstance(plain[other], dict):  # no reader of the printed configuration shall find a shared key twice
        plain[other] = _part(plain[other], shared=False)
    expand_homes(plain)
    return _Values(plain, algorithm, problems, overruled, given_as)


def _add_default_environment(plain: dict[str, Any]) -> None:
    """Add the default environment to a run that names no environment, or none for rows without a task_name."""
    for name, environment in DEFAULT_ENVIRONMENT.items():
        if not plain["env"] or plain["data"]["task_name"] == name:
            plain["env"].setdefault(name, dict(environment))


def _choose_training(plain: dict[str, Any], on_command_line: Collection[str]) -> None:
    """Drop the recipe's single training set when the command line gives several."""
    sets = any(name.startswith("data.train_sets") for name in on_command_line)
    if sets and "data.train_path" not in on_command_line:
        plain["data"]["train_path"] = MISSING


def _files(accepted: Sequence[str]) -> list[str]:
    """The files of conf/ that Hydra composes for a command line, the last read last. Needs Hydra initialised."""
    loader = GlobalHydra.instance().config_loader()
    found = loader.compute_defaults_list("config", list(accepted), RunMode.RUN).defaults
    return [
        one.config_path for one in found if one.config_path and one.config_path.partition("/")[0] in config_groups()
    ]


def _overruled(job: Job, accepted: list[str], composed: DictConfig) -> Iterator[Problem]:
    """Settings of the job that an option on the command line sets to another value: half of a preset is no preset."""
    chosen = [one for one in accepted if one.partition("=")[0] in config_groups().keys() - {RECIPES, "env"}]
    chosen.sort(key=lambda one: one.startswith(f"{VARIANTS}="))  # Hydra reads the variant last
    said_by: dict[str, str] = {}
    for one in chosen:
        said_by |= {named_for("grpo", key): one for key in settings_of(one.replace("=", "/", 1))}
    for key in said_by.keys() & job.settings.keys():
        value, given = job.settings[key], OmegaConf.select(composed, key)
        if given != value and str(given) != shown(value):
            text = f"{said_by[key]} says {given}; leave one of them out, or give {key}=... on the command line"
            yield Problem(f"{key}={shown(value)}", text)


@functools.cache
def _store_defaults() -> None:
    """Tell Hydra the schema's defaults, once for a process.

    Environments are left to conf/env, so that choosing one does not keep the default one.
    """
    tree = without_shared(dataclasses.asdict(Config()))
    tree["env"] = {}
    ConfigStore.instance().store("schema_defaults", tree)


def _not_composed(accepted: Sequence[str], error: Exception) -> Problem:
    """Hydra's error as a problem of the override that its message names, else of all overrides."""
    culprit = next((one for one in reversed(accepted) if one in str(error)), " ".join(accepted) or "conf/")
    reason = error.__cause__ or error
    return Problem(shown(culprit.lstrip("+")), _one_line(reason))


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
    """Hydra's and OmegaConf's messages put the essence first and add where they were raised below."""
    return str(error).strip().splitlines()[0].strip()
