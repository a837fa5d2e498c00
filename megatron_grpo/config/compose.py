"""From a command line to a checked Config: Hydra composes conf/ over the schema's defaults, mistakes are collected."""

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

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.job import split_job
from megatron_grpo.config.keys import keys, known_key
from megatron_grpo.config.layout import layout_problems
from megatron_grpo.config.machine import machine_problems
from megatron_grpo.config.model_source import known_shape
from megatron_grpo.config.overrides import config_groups, read_overrides, unknown_key
from megatron_grpo.config.schema import MISSING, Config

CONF_MODULE = "megatron_grpo.conf"
_ADAPTER = TypeAdapter(Config)


def load_config(overrides: Sequence[str]) -> Config:
    """The configuration of a run that can start on this machine.

    Args:
        overrides: Hydra's syntax, as on the command line: "+exp=quickstart", "grpo.max_num_steps=3"; and "job=FILE".

    Raises:
        ConfigError: anything is wrong, in the configuration or with what it asks of the machine (files, GPUs); names
            every problem.
    """
    config = compose_config(overrides)
    problems = machine_problems(config)
    if problems:
        raise ConfigError(split_job(overrides)[0].named(problems))
    return config


def compose_config(overrides: Sequence[str]) -> Config:
    """The configuration, checked by itself: names, types, ranges, layout and batch arithmetic, but no file and no GPU.

    Raises:
        ConfigError: names every problem.
    """
    values, problems = compose_values(overrides)
    config, wrong = _typed(values)
    unresolved = {problem.key for problem in problems}
    problems += [problem for problem in wrong if problem.key not in unresolved]
    # What is known to be wrong stands at its default now: complaints about that would be about nothing.
    already = {problem.key for problem in problems}
    if config is not None:
        if not already & config_groups().keys():  # a recipe that was not found would have given what is missing
            problems += _missing(values, already)
        problems += [p for p in layout_problems(config, known_shape(config)) if p.key not in already]
    if problems:
        raise ConfigError(split_job(overrides)[0].named(problems))
    assert config is not None
    return config


def compose_values(overrides: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """The resolved values as plain containers, and what was wrong on the way; required keys may still be "???"."""
    job, arguments = split_job(overrides)
    accepted, problems = read_overrides([*job.environment_override(config_groups()["env"]), *arguments])
    problems += job.problems
    ConfigStore.instance().store("schema_defaults", _defaults_tree())
    with initialize_config_module(CONF_MODULE, version_base="1.3"):
        try:
            composed = compose("config", accepted)
        except (HydraException, OmegaConfBaseException) as error:
            return {}, [*problems, Problem(" ".join(accepted) or "conf/", _one_line(error))]
    job.apply(composed, config_groups()["env"])
    problems += _unresolved(composed)
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}, problems


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
