"""Reads the overrides of a command line, and the folders of recipes and options that it adds to conf/.

Overrides are parsed one by one, so that each mistake among them gets its own message.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.keys import FREE_TYPE, find_key, flatten, is_match, is_section, list_members, read_keys
from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.config.suggestions import list_unknown_keys

CONF_MODULE = "megatron_grpo.conf"
"""The package of YAML files."""
OPTION = "--config-dir"
"""Adds a folder of recipes and options: --config-dir=FOLDER."""
SEARCH_KEY = "hydra.searchpath"
"""Adds several folders: hydra.searchpath=[FOLDER,...]."""
RECIPES = "exp"
"""The group whose options are whole recipes."""
VARIANTS = "variant"
"""The group whose options are published variants of an algorithm; Hydra reads it after all others."""
ALIASES = {"cluster.nodes": "cluster.num_nodes"}
"""Other names of keys on the command line."""
DEEPEST = 20
"""Deepest nesting of brackets; Hydra's parser takes seconds for thousands."""
_FILE = "file://"
_TEXT = ("text", "text or null")
"""Types of keys whose values are taken literally, whatever characters they contain."""

_added: ContextVar[tuple[Path, ...]] = ContextVar("added", default=())


def _folders() -> list[Traversable]:
    """The folders that hold groups of options, conf/ first."""
    return [resources.files(CONF_MODULE), *_added.get()]


@contextlib.contextmanager
def search_path(arguments: Sequence[str]) -> Iterator[tuple[list[str], list[Problem]]]:
    """Within this context, options are also looked up in the folders that a command line adds.

    Yields:
        The other arguments, and problems of the folders.
    """
    added: list[Path] = []
    others: list[str] = []
    problems: list[Problem] = []
    rest = iter(arguments)
    for argument in rest:
        name, _, value = argument.lstrip("+").partition("=")
        if name == OPTION:
            given = [value or next(rest, "")]
        elif name == SEARCH_KEY:
            given = _listed(value)
        else:
            others.append(argument)
            continue
        for one in given:
            folder = Path(os.path.expanduser(one.removeprefix(_FILE))).absolute()
            reason = _unfit(folder)
            if reason is None:
                added.append(folder)
            else:
                problems.append(Problem(f"{name}={to_text(one)}", reason))
    token = _added.set(tuple(added))
    try:
        yield others, problems
    finally:
        _added.reset(token)


def build_search_override() -> list[str]:
    """The override with which Hydra searches the added folders."""
    added = _added.get()
    return [f"{SEARCH_KEY}=[{','.join(repr(_FILE + str(folder)) for folder in added)}]"] if added else []


def _listed(value: str) -> list[str]:
    try:
        given = yaml.safe_load(value)
    except yaml.YAMLError:
        given = value
    return [str(one) for one in (given if isinstance(given, list) else [given])]


def _unfit(folder: Path) -> str | None:
    """The reason why a folder cannot be added, or None."""
    if not folder.is_dir():
        return "no such folder"
    own = resources.files(CONF_MODULE)
    groups = {group.name for group in own.iterdir() if group.is_dir()}
    found = [file for group in sorted(groups) for file in sorted((folder / group).glob("*.yaml"))]
    if not found:
        return f"has no recipe and no option: files such as exp/NAME.yaml; groups are {', '.join(sorted(groups))}"
    for file in found:
        if own.joinpath(file.parent.name, file.name).is_file():
            return f"has {file.parent.name}/{file.name}, a name that is taken already; rename it"
    return None


@dataclass(slots=True)
class Overrides:
    """The overrides of a command line, sorted."""

    accepted: list[str] = field(default_factory=list)
    """Overrides in a form that Hydra takes."""
    unknown: list[str] = field(default_factory=list)
    """Keys that the schema does not have."""
    problems: list[Problem] = field(default_factory=list)
    """Mistakes in the other overrides."""
    given: dict[str, str] = field(default_factory=dict)
    """Values as text by key, wrong ones included; for a section given as {...} also the values of each of its keys."""


def list_config_groups() -> dict[str, list[str]]:
    """The groups of conf/ and the options of each, added folders included, sorted."""
    options: dict[str, list[str]] = {}
    for name in sorted(folder.name for folder in resources.files(CONF_MODULE).iterdir() if folder.is_dir()):
        groups = [group for folder in _folders() if (group := folder.joinpath(name)).is_dir()]
        files = [file.name for group in groups for file in group.iterdir() if file.name.endswith(".yaml")]
        if files:
            options[name] = sorted(file.removesuffix(".yaml") for file in files)
    return options


def read_settings(path: str) -> dict[str, Any]:
    """Keys and values that a file of conf/ ("variant/dapo") sets itself, without the files in its defaults list."""
    file = next(file for folder in _folders() if (file := folder.joinpath(f"{path}.yaml")).is_file())
    text = file.read_text(encoding="utf-8")
    prefix = "" if "# @package _global_" in text else f"{path.rpartition('/')[0]}."
    return {key: value for key, value in flatten(yaml.safe_load(text) or {}, prefix) if key != "defaults"}


def read_overrides(overrides: Sequence[str]) -> Overrides:
    """Sort the overrides of a command line into those that Hydra takes, unknown keys and mistakes."""
    read, options = Overrides(), list_config_groups()
    parser = OverridesParser.create()
    for given in overrides:
        name, _, value = given.lstrip("+~").partition("=")
        text = given.replace(name, ALIASES[name], 1) if name in ALIASES else given
        name = ALIASES.get(name, name)
        read.given[name] = to_text(value)
        if text.startswith("~"):
            problem = _delete(read, text, name, options)
        else:
            problem = _malformed(text, options) or _read(read, parser, text, options)
        if problem is not None:
            read.problems.append(problem)
    return read


def _malformed(text: str, options: Mapping[str, Sequence[str]]) -> Problem | None:
    """The problem of an argument that is not a KEY=VALUE, or None."""
    name, equals, value = text.lstrip("+").partition("=")
    if not equals and (advice := _advice_on_path(name)) is not None:
        return Problem(text, f"not understood; {advice}")
    if not equals:
        choices = {option: f"+{group}={option}" for group, found in options.items() for option in found}
        close = difflib.get_close_matches(name, choices, n=1)
        if close:
            return Problem(text, f"not understood; did you mean {choices[close[0]]}?")
        given = f"{name}=..." if find_key(name) else "key=value"
        return Problem(text, f"not understood; write {given}")
    if not name.strip():
        return Problem(text, "has no key before the =; write key=value")
    if find_key(name) is None and measure_nesting(value) > DEEPEST:
        return Problem(f"{name}={to_text(value)}", f"has brackets within brackets, more than {DEEPEST} deep")
    return None


def _advice_on_path(word: str) -> str | None:
    """The key for a word that is a path or a hub name rather than key=value; None: it is neither."""
    kind = Path(word).suffix.lower()
    if kind in (".yaml", ".yml"):
        return f"job={word} takes the fields of a flat YAML; a recipe of your own is --config-dir=FOLDER +exp=NAME"
    if kind in (".jsonl", ".parquet", ".arrow", ".csv"):
        return f"write data.train_path={word}"
    return f"a model is policy.model.path={word}" if is_hub_name(word) or os.path.isdir(word) else None


def _read(read: Overrides, parser: OverridesParser, text: str, options: Mapping[str, Sequence[str]]) -> Problem | None:
    """Add an argument to the accepted or unknown ones, or return its problem.

    Keys are accepted as `++key=value`, whatever sign the user put before them: Hydra then overrides or adds the key.
    """
    name, _, value = text.lstrip("+").partition("=")
    override = _parsed(parser, text, find_key(name), value)
    if isinstance(override, Problem):
        return override
    if override is None:
        literal = QuotedString(text=value, quote=Quote.single).with_quotes()
        read.accepted.append(f"++{name}={literal}")
        return None
    name, given = override.key_or_group, override.value()
    if isinstance(given, dict):
        read.given |= {key: to_text(value) for key, value in flatten(given, f"{name}.")}
    if name in options and not isinstance(given, dict):
        if given not in options[name]:
            option, kind = to_text(given), "recipe" if name == RECIPES else "option"
            close = difflib.get_close_matches(option, options[name], n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            return Problem(f"{name}={option}", f"no such {kind}; {hint}there is {', '.join(options[name])}")
        chosen = next((one for one in read.accepted if one.startswith(f"{name}=")), f"{name}={given}")
        if chosen != f"{name}={given}":  # Hydra would silently take the last one
            return Problem(f"{chosen} {name}={given}", f"a run takes one {name}; leave out the others")
        read.accepted.append(chosen)
    elif find_key(name) or (is_section(name) and isinstance(given, dict)):
        read.accepted.append("++" + text.lstrip("+"))
    elif is_match("env.<name>", name) and name.replace("env.", "env.<name>.", 1) in read_keys():
        key = name.replace("env.", "env.NAME.", 1)
        return Problem(text, f"is {key}; NAME is an environment's, such as the one that data.task_name names")
    elif is_section(name):
        return Problem(text, f"{name} is a section; set one of its keys: {', '.join(list_members(name))}")
    else:
        read.unknown += list_unknown_keys(name, given)
    return None


def _parsed(parser: OverridesParser, text: str, key: str | None, value: str) -> Override | Problem | None:
    """The argument as Hydra parses it, or its problem; None: the value is a text to be taken literally."""
    kind = read_keys()[key].type if key else None
    name = text.lstrip("+").partition("=")[0]
    too_deep = key is not None and measure_nesting(value) > DEEPEST
    try:
        override = None if too_deep else parser.parse_override(text)
        given = None if override is None else override.value()
    except (HydraException, ValueError, RecursionError):  # ValueError: a number of thousands of digits
        override = given = None
    if override is None:
        if kind in _TEXT:
            half_quoted = any(value.startswith(sign) != value.endswith(sign) or value == sign for sign in "'\"")
            return Problem(text, "has a quote that is not closed") if half_quoted else None
        if kind is None:
            return Problem(
                to_text(text), "not understood; write key=value, with quotes around a value with other signs"
            )
        advice = ", written [a,b], with quotes around each text" if "list" in kind else ""
        return Problem(f"{name}={to_text(value)}", f"must be {kind}{advice}")
    if override.is_sweep_override():
        advice = f"a text with commas needs quotes: '{name}=\"...\"'" if kind in _TEXT else "lists are written [a,b]"
        return Problem(text, f"several values at once; a run takes one, and {advice}")
    if kind not in (None, FREE_TYPE) and isinstance(given, dict):
        return Problem(f"{name}={to_text(value)}", f"must be {kind}")
    if kind in _TEXT and isinstance(given, bool | int | float):
        return None  # run_dir=2026_01 is a text, although Python reads 2026_01 as a number
    return override


def _delete(read: Overrides, text: str, name: str, options: Mapping[str, Sequence[str]]) -> Problem | None:
    """Accept ~env.NAME, which removes an environment; no other key can be removed, because each needs a value."""
    if "=" not in text and is_match("env.<name>", name):
        read.accepted.append(text)
        return None
    if name in options:
        return Problem(text, f"a group cannot be removed; choose another {name}, or set single keys")
    if key := find_key(name):
        return Problem(text, f"every key has a value; write {name}=..., {read_keys()[key].default_text} by default")
    if is_section(name):
        return Problem(text, f"would drop what the recipe sets in {name}; set single keys of it instead")
    read.unknown.append(name)
    return None


def measure_nesting(text: str) -> int:
    """Depth of nested brackets in a text."""
    depth = deepest = 0
    for sign in text:
        depth += {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}.get(sign, 0)
        deepest = max(deepest, depth)
    return deepest
