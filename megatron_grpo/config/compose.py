"""From a command line to a typed Config: Hydra composes conf/ over the schema's defaults, mistakes are collected."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from megatron_grpo.config.loop_schema import LOOPS, SHARED, is_foreign_to, is_shared, named_for, other_than
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
    """Keys that the user gave and that the other algorithm reads, also those given at their defaults.

    Args:
        algorithm: the one that runs.
        given: values, as text, by key.
        already: keys that another problem names.
    """
    for key, value in given.items():
        if is_foreign_to(algorithm, key) and "." in key and key not in already:
            yield Problem(f"{key}={value}", misplaced(key, algorithm))


def misplaced(key: str, algorithm: str) -> str:
    """What to say of a key that only the algorithm reads that does not run."""
    advice = {
        "ppo.ppo_epochs": "; give grpo.num_iterations",
        "grpo.num_iterations": "; give ppo.ppo_epochs",
    }.get(key, "; the value model is PPO's baseline" if algorithm == "ppo" else "")
    return f"is for algorithm={other_than(algorithm)}, and this run has algorithm={algorithm}{advice}"


@dataclass(slots=True)
class United:
    """The outcome."""

    given_as: dict[str, str] = field(default_factory=dict)
    """The name that a shared key was given under, where it is not that of the algorithm that runs."""
    problems: list[Problem] = field(default_factory=list)


def without_shared(defaults: dict[str, Any]) -> dict[str, Any]:
    """Defaults of the schema without those of shared keys, so that what is there after composing was given."""
    own = {loop: {key: value for key, value in defaults[loop].items() if key not in SHARED} for loop in LOOPS}
    return defaults | own


def unite(
    composed: DictConfig, algorithm: str, on_command_line: Collection[str], files: Callable[[], Sequence[str]]
) -> United:
    """Write one value of each shared key into both sections: the given one, else the default of the algorithm.

    Args:
        composed: what Hydra made of defaults `without_shared`.
        algorithm: the one that runs.
        on_command_line: keys that stand there.
        files: gives the paths in conf/ of what was composed, the one that counts most last; takes a tenth of a second.
    """
    united = United()
    tree = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(tree, dict)
    if not all(isinstance(tree.get(loop), dict) for loop in LOOPS):
        return united  # a recipe that has something else there is told so when the types are checked
    given = {loop: {name: value for name, value in leaves(tree[loop]) if _known(name)} for loop in LOOPS}
    values = _defaults(algorithm)
    other = other_than(algorithm)
    for name in given[algorithm] | given[other]:
        winner = algorithm if name in given[algorithm] else other
        if name in given[other] and winner == algorithm and given[other][name] != given[algorithm][name]:
            decided = _said_last(name, on_command_line, files)
            winner = decided or algorithm
            if decided is None:
                one, two = (f"{loop}.{name}={shown(given[loop][name])}" for loop in (algorithm, other))
                united.problems.append(Problem(one, f"is the same setting as {two}; leave one of them out"))
        values[name] = given[winner][name]
        if winner == other:
            united.given_as[f"{algorithm}.{name}"] = f"{other}.{name}"
    for loop in LOOPS:
        for name, value in values.items():
            _put(tree[loop], name.split("."), value)
        OmegaConf.update(composed, loop, tree[loop], merge=False)
    return united


def drop_shared(values: dict[str, Any], algorithm: str) -> None:
    """Take the shared keys out of the section of the algorithm that does not run, where nothing reads them."""
    section = values.get(other_than(algorithm))
    if isinstance(section, dict):
        for name in [name for name, _ in leaves(section) if _known(name)]:
            _take(section, name.split("."))


def _known(name: str) -> bool:
    """Whether a name, without its section, is a shared key of the schema."""
    return is_shared(f"{LOOPS[0]}.{name}") and known_key(f"{LOOPS[0]}.{name}") is not None


def _defaults(algorithm: str) -> dict[str, Any]:
    section = dataclasses.asdict(getattr(Config(), algorithm))
    return {name: value for name, value in leaves(section) if _known(name)}


def _said_last(name: str, on_command_line: Collection[str], files: Callable[[], Sequence[str]]) -> str | None:
    """The algorithm under whose name a key was set by what counts most; None: both were set in one place."""
    for place in _places(on_command_line, files):
        saying = [loop for loop in LOOPS if f"{loop}.{name}" in place]
        if saying:
            return saying[0] if len(saying) == 1 else None
    return None


def _places(on_command_line: Collection[str], files: Callable[[], Sequence[str]]) -> Iterator[Collection[str]]:
    """The keys that each place sets, the one that counts most first."""
    yield on_command_line
    for file in reversed(files()):
        yield settings_of(file)


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value in nested mappings; what has no room for it is told when the types are checked."""
    node: Any = tree
    for part in path[:-1]:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node[path[-1]] = copy.deepcopy(value)


def _take(tree: dict[str, Any], path: Sequence[str]) -> None:
    """Remove a value from nested mappings, and the mappings that it leaves empty."""
    below = tree.get(path[0])
    if len(path) > 1 and isinstance(below, dict):
        _take(below, path[1:])
    if len(path) == 1 or below == {}:
        tree.pop(path[0], None)


DEFAULT_ENVIRONMENT = {name: {"type": environment.type} for name, environment in Config().env.items()}
"""The environments of a run that names none."""


def _fifth_of(length: Any) -> int:
    """${fifth_of:${...}} in conf/: YAML cannot calculate. Of what is no length, which is told under its own key, 1."""
    return max(1, length // 5) if isinstance(length, int) else 1


OmegaConf.register_new_resolver("fifth_of", _fifth_of, replace=True)


@dataclasses.dataclass(slots=True)
class _Values:
    """What a command line and its job say, before any of it is typed."""

    plain: dict[str, Any]
    """Resolved, as plain containers; required keys may still be "???". Empty: nothing could be composed."""
    algorithm: str
    problems: list[Problem]
    overruled: list[Problem] = dataclasses.field(default_factory=list)
    """What job and command line say differently."""
    given_as: dict[str, str] = dataclasses.field(default_factory=dict)
    """The name that a key of the algorithm was given under, where that is the other algorithm's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Composed:
    """What a command line and its job make, before it is checked as a whole."""

    config: Config | None
    """None: nothing could be made of the values."""
    values: dict[str, Any]
    """The values as they were given or are by default, resolved; empty when nothing could be composed."""
    job: Job
    problems: list[Problem]
    already: set[str]
    """Keys that the problems name; complaints about them, or against their defaults, would be about nothing."""
    defaulted: set[str]
    """Keys of the schema that stand at their default because what was given is wrong."""
    given_as: dict[str, str]
    """The name that a key of the algorithm was given under, where that is the other algorithm's."""

    def named(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems under the names that the user gave: a job's fields, the other algorithm's keys."""
        return [self._named(problem) for problem in self.job.named(problems)]

    def _named(self, problem: Problem) -> Problem:
        name = self.given_as.get(problem.key)
        if name is None:
            return problem
        return Problem(name + problem.subject[len(problem.key) :], f"{problem.text} (it sets {problem.key})")


def compose_typed(overrides: Sequence[str]) -> Composed:
    """The configuration of a command line: names, types and ranges checked, but not yet how its parts fit together."""
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
        united = unite(
            composed, algorithm, keys_on(arguments), lambda: _files([*hydra_override(added), *read.accepted])
        )
    problems = [*(unknown_key(name, algorithm) for name in read.unknown), *read.problems, *job.problems]
    overruled = list(_overruled(job, read.accepted, composed))
    problems += united.problems
    problems += job.apply(composed, environments)
    problems += _unresolved(composed)
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    plain = {str(name): value for name, value in values.items()}
    if not any(argument.startswith("~env.") for argument in arguments):
        _add_default_environment(plain)
    _choose_training(plain, keys_on(arguments))
    drop_shared(plain, algorithm)
    expand_homes(plain)
    return _Values(plain, algorithm, problems, overruled, united.given_as)


def _add_default_environment(plain: dict[str, Any]) -> None:
    """Add the default environment to a run that names no environment, or none for rows without a task_name."""
    for name, environment in DEFAULT_ENVIRONMENT.items():
        if not plain["env"] or plain["data"]["task_name"] == name:
            plain["env"].setdefault(name, dict(environment))


def _choose_training(plain: dict[str, Any], on_command_line: Collection[str]) -> None:
    """Let training sets that are given on the command line take the place of the recipe's single set."""
    sets = any(name.startswith("data.train_sets") for name in on_command_line)
    if sets and "data.train_path" not in on_command_line:
        plain["data"]["train_path"] = MISSING


def _files(accepted: Sequence[str]) -> list[str]:
    """The files of conf/ that are composed for a command line, the one that counts most last. Within Hydra only."""
    loader = GlobalHydra.instance().config_loader()
    found = loader.compute_defaults_list("config", list(accepted), RunMode.RUN).defaults
    return [
        one.config_path for one in found if one.config_path and one.config_path.partition("/")[0] in config_groups()
    ]


def _overruled(job: Job, accepted: list[str], composed: DictConfig) -> Iterator[Problem]:
    """Settings of the job that a variant or another group on the command line sets too: half of a preset is none."""
    chosen = [one for one in accepted if one.partition("=")[0] in config_groups().keys() - {RECIPES, "env"}]
    chosen.sort(key=lambda one: one.startswith(f"{VARIANTS}="))  # a variant has the last word among them
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
    """What Hydra could not do: with one override, if its message names one, else with all of them."""
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
