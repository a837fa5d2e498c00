"""From a command line to a typed Config: Hydra composes conf/ over the schema's defaults, mistakes are collected."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_grpo.composition.either_name import drop_shared, unite, without_shared
from megatron_grpo.composition.job import Job, given_keys, keys_on, split_job
from megatron_grpo.composition.misplaced import misplaced_keys
from megatron_grpo.composition.overrides import (
    RECIPES,
    VARIANTS,
    config_groups,
    read_overrides,
    settings_of,
)
from megatron_grpo.composition.search_path import CONF_MODULE, hydra_override, searched, split_search_path
from megatron_grpo.composition.suggestions import unknown_key
from megatron_grpo.composition.typed import expand_homes, missing, typed
from megatron_grpo.config.errors import Problem, shown
from megatron_grpo.config.keys import known_key
from megatron_grpo.config.loop_keys import LOOPS, named_for
from megatron_grpo.config.schema import Config

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
