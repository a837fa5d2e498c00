"""From a command line to a typed Config: Hydra composes conf/ over the schema's defaults, mistakes are collected."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megatron_grpo.config.changes import leaves
from megatron_grpo.config.checks.ppo import misplaced_keys
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.job import Job, given_keys, split_job
from megatron_grpo.config.keys import keys, known_key
from megatron_grpo.config.overrides import RECIPES, VARIANTS, config_groups, keys_of_option, read_overrides, unknown_key
from megatron_grpo.config.schema import MISSING, Config

CONF_MODULE = "megatron_grpo.conf"
_ADAPTER = TypeAdapter(Config)


def _fifth_of(length: Any) -> int:
    """${fifth_of:${...}} in conf/: YAML cannot calculate. Of what is no length, which is told under its own key, 1."""
    return max(1, length // 5) if isinstance(length, int) else 1


OmegaConf.register_new_resolver("fifth_of", _fifth_of, replace=True)


def compose_values(overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """The resolved values as plain containers, and what was wrong on the way; required keys may still be "???"."""
    values, problems, overruled = _composed(*split_job(overrides))
    return values, problems + overruled


@dataclasses.dataclass(frozen=True, slots=True)
class Composed:
    """What a command line and its job make, before it is checked as a whole."""

    config: Config | None
    """None: nothing could be made of the values."""
    job: Job
    problems: list[Problem]
    already: set[str]
    """Keys that the problems name; complaints about them, or against their defaults, would be about nothing."""
    defaulted: set[str]
    """Keys of the schema that stand at their default because what was given is wrong."""


def compose_typed(overrides: Sequence[str]) -> Composed:
    """The configuration of a command line: names, types and ranges checked, but not yet how its parts fit together."""
    job, arguments = split_job(overrides)
    values, problems, overruled = _composed(job, arguments)
    problems += _booleans(values)
    config, wrong = _typed(values)
    unresolved = {problem.key for problem in problems}
    problems += [problem for problem in wrong if problem.key not in unresolved]
    already = {problem.key for problem in problems}
    defaulted = {key for key in already if known_key(key)}
    problems += [problem for problem in overruled if problem.key not in already]
    if config is not None:
        if not already & config_groups().keys():  # a recipe that was not found would have given what is missing
            problems += _missing(values, already)
        misplaced = list(misplaced_keys(config.algorithm, given_keys(job, arguments), already))
        already |= {problem.key for problem in misplaced}
        problems += misplaced
    return Composed(config, job, problems, already, defaulted)


def _composed(job: Job, arguments: list[str]) -> tuple[dict[str, Any], list[Problem], list[Problem]]:
    """The resolved values, what was wrong on the way, and what job and command line say differently."""
    environments = config_groups()["env"]
    accepted, problems = read_overrides([*job.environment_override(environments), *arguments])
    problems += job.problems
    ConfigStore.instance().store("schema_defaults", _defaults_tree())
    with initialize_config_module(CONF_MODULE, version_base="1.3"):
        try:
            composed = compose("config", accepted)
        except (HydraException, OmegaConfBaseException) as error:
            return {}, [*problems, Problem(" ".join(accepted) or "conf/", _one_line(error))], []
    overruled = list(_overruled(job, accepted, composed))
    problems += job.apply(composed, environments)
    problems += _unresolved(composed)
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}, problems, overruled


def _overruled(job: Job, accepted: list[str], composed: DictConfig) -> Iterator[Problem]:
    """Settings of the job that a variant or another group on the command line sets too: half of a preset is none."""
    chosen = [one for one in accepted if one.partition("=")[0] in config_groups().keys() - {RECIPES, "env"}]
    chosen.sort(key=lambda one: one.startswith(f"{VARIANTS}="))  # a variant has the last word among them
    said_by = {key: one for one in chosen for key in keys_of_option(one) if key in job.settings}
    for key, argument in said_by.items():
        value, given = job.settings[key], OmegaConf.select(composed, key)
        if given != value and str(given) != str(value):
            text = f"{argument} says {given}; leave one of them out, or give {key}=... on the command line"
            yield Problem(f"{key}={value}", text)


def _defaults_tree() -> dict[str, Any]:
    """The schema's defaults; environments are left to conf/env, so that choosing one does not keep the default one."""
    tree = dataclasses.asdict(Config())
    tree["env"] = {}
    return tree


def _typed(values: dict[str, Any]) -> tuple[Config | None, list[Problem]]:
    """The values as a Config; wrong ones are reported and take their defaults. None: nothing could be made of them."""
    problems: list[Problem] = []
    for _ in range(2):
        try:
            return _ADAPTER.validate_python(values), problems
        except ValidationError as error:
            details = error.errors(include_url=False)
        for detail in details:
            problems.append(_problem(detail))
            _remove(values, detail["loc"])
    return None, problems


def _booleans(values: dict[str, Any]) -> list[Problem]:
    """Booleans where numbers or texts belong, which Python would take for 1 and 0; they are removed."""
    wrong = []
    for name in [name for name, value in leaves(values) if isinstance(value, bool)]:
        key = known_key(name)
        if key is not None and "true or false" not in keys()[key].type:
            wrong.append(Problem(f"{name}={_get(values, name)}", f"must be {keys()[key].type}"))
            _remove(values, tuple(name.split(".")))
    return wrong


def _problem(detail: ErrorDetails) -> Problem:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return unknown_key(name)
    key = known_key(name)
    value = "null" if detail["input"] is None else detail["input"]
    if key is None:
        return Problem(f"{name}={value}", detail["msg"][:1].lower() + detail["msg"][1:])
    return Problem(f"{name}={value}", f"must be {keys()[key].type}")


def _remove(values: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    """Delete a wrong value; of a wrong list element, the whole list."""
    node: Any = values
    for part in loc[:-1]:
        if not isinstance(node[part], dict):
            node.pop(part)
            return
        node = node[part]
    node.pop(loc[-1], None)


def _missing(values: dict[str, Any], already: set[str]) -> list[Problem]:
    return [
        Problem(name, f"is required: {keys()[name].doc}")
        for name in keys()
        if name not in already and "<" not in name and _get(values, name) == MISSING
    ]


def _get(values: dict[str, Any], name: str) -> Any:
    node: Any = values
    for part in name.split("."):
        if not isinstance(node, dict):
            return None
        node = node.get(part)
    return node


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


def _one_line(error: Exception) -> str:
    """Hydra's and OmegaConf's messages put the essence first and add where they were raised below."""
    return str(error).strip().splitlines()[0].strip()
