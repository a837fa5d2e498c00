"""Reads the overrides of a command line one by one, so that each mistake among them gets its own message."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from megatron_grpo.config.changes import leaves
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import groups, known_key, known_section, matches, nearest

RECIPES = "exp"
"""The group whose options are whole recipes."""
VARIANTS = "variant"
"""The group whose options are published variants; it comes after all others."""


def config_groups() -> dict[str, list[str]]:
    """The groups of conf/ and the options of each, sorted."""
    folders = (folder for folder in resources.files("megatron_grpo.conf").iterdir() if folder.is_dir())
    options = {folder.name: _options(folder) for folder in folders}
    return {name: options[name] for name in sorted(options) if options[name]}


def keys_of_option(override: str) -> set[str]:
    """The keys that the chosen option of a group (GROUP=OPTION) sets."""
    group, _, option = override.partition("=")
    text = resources.files("megatron_grpo.conf").joinpath(group, f"{option}.yaml").read_text()
    prefix = "" if "# @package _global_" in text else f"{group}."
    return {key for key, _ in leaves(yaml.safe_load(text) or {}, prefix)}


def _options(folder: Traversable) -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def read_overrides(overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """What can be given to Hydra, and what is wrong with the rest."""
    accepted: list[str] = []
    problems: list[Problem] = []
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            problems.append(Problem(text, "not understood; write key=value, with quotes around spaces and commas"))
            continue
        if override.is_sweep_override():
            problems.append(Problem(text, "several values at once; a run takes one, and lists are written [a,b]"))
            continue
        outcome = _read(override, text)
        if isinstance(outcome, Problem):
            problems.append(outcome)
        else:
            accepted.append(outcome)
    return accepted, problems


def _read(override: Override, text: str) -> str | Problem:
    """The override in the form that Hydra accepts whatever sign the user put before it, or what is wrong."""
    name, options = override.key_or_group, config_groups()
    value = override.value()
    if name in options and not isinstance(value, dict):
        if value in options[name]:
            return f"{name}={value}"
        return _unknown_option(name, "null" if value is None else str(value), options[name])
    if override.is_delete():
        return text
    if known_key(name):
        return "++" + text.lstrip("+")
    if known_section(name):
        if isinstance(value, dict):
            return "++" + text.lstrip("+")
        return Problem(text, f"{name} is a section; set one of its keys: {', '.join(_members(name))}")
    return unknown_key(text.lstrip("+~").partition("=")[0])


def unknown_key(name: str) -> Problem:
    """The complaint about a key that the schema does not have."""
    if name.split(".")[0] == "hydra":
        return Problem(name, "Hydra's own settings have no effect here; run_dir chooses where a run writes")
    guess = nearest(name)
    return Problem(name, f"unknown key; did you mean {guess}?" if guess else "unknown key; --cfg job shows all keys")


def _unknown_option(group: str, value: str, options: list[str]) -> Problem:
    close = difflib.get_close_matches(value, options, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    kind = "recipe" if group == RECIPES else "option"
    return Problem(f"{group}={value}", f"no such {kind}; {hint}there is {', '.join(options)}")


def _members(section: str) -> list[str]:
    found = []
    for group in groups():
        if matches(group.name, section):
            found += [key.name.rpartition(".")[2] for key in group.keys]
        elif matches(group.name.rpartition(".")[0], section):
            found.append(group.name.rpartition(".")[2])
    return found
