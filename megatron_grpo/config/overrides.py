"""Parses the overrides of a command line; adds folders to conf/."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
from collections.abc import Iterator, Sequence
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

from megatron_grpo.config.algorithms import is_algorithm_name
from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.keys import FREE_TYPE, find_key, flatten, is_match, is_section, list_members, read_keys
from megatron_grpo.config.paths import is_hub_name
from megatron_grpo.config.suggestions import list_unknown_keys

CONF_MODULE = "megatron_grpo.conf"  # the package of YAML files: `conf/` in the repository (setup.py)
OPTION = "--config-dir"  # --config-dir=FOLDER adds a folder of recipes and options
SEARCH_KEY = "hydra.searchpath"  # hydra.searchpath=[FOLDER,...] adds several
RECIPES = "exp"  # the config group whose options are whole recipes
VARIANTS = "variant"  # the config group of published variants of an algorithm; Hydra reads it after all others
ALIASES = {"cluster.nodes": "cluster.num_nodes"}  # second names of keys on the command line
MAX_NESTING = 20  # deepest nesting of brackets
_FILE = "file://"
Groups = dict[str, list[str]]  # options by group of conf/
_TEXT = ("text", "text or null")  # types of keys whose values are taken literally, whatever characters they contain
# Folders that the command line adds; a context variable, because a notebook may compose in several threads.
_added_folders: ContextVar[tuple[Path, ...]] = ContextVar("added", default=())


def _list_folders() -> list[Traversable]:
    return [resources.files(CONF_MODULE), *_added_folders.get()]


@contextlib.contextmanager
def search_path(arguments: Sequence[str]) -> Iterator[tuple[list[str], list[Problem]]]:
    """Add folders to conf/ within the body; yield other arguments and problems."""
    added: list[Path] = []
    remaining: list[str] = []
    problems: list[Problem] = []
    arguments_left = iter(arguments)
    for argument in arguments_left:
        name, _, value = argument.lstrip("+").partition("=")
        if name == OPTION:
            paths = [value or next(arguments_left, "")]
        elif name == SEARCH_KEY:
            try:
                folders = yaml.safe_load(value)
            except yaml.YAMLError:
                folders = value
            paths = [str(folder) for folder in (folders if isinstance(folders, list) else [folders])]
        else:
            remaining.append(argument)
            continue
        for path in paths:
            folder = Path(os.path.expanduser(path.removeprefix(_FILE))).absolute()
            reason = _check_folder(folder)
            if reason is None:
                added.append(folder)
            else:
                problems.append(Problem(f"{name}={to_text(path)}", reason))
    token = _added_folders.set(tuple(added))
    try:
        yield remaining, problems
    finally:
        _added_folders.reset(token)


def build_search_override() -> list[str]:
    """Build the override with which Hydra searches the added folders."""
    added = _added_folders.get()
    return [f"{SEARCH_KEY}=[{','.join(repr(_FILE + str(folder)) for folder in added)}]"] if added else []


def is_composition(name: str) -> bool:
    """True if an argument composes the configuration from files."""
    return name == OPTION or name.lstrip("+") in {SEARCH_KEY, *list_config_groups()}


def _check_folder(folder: Path) -> str | None:
    if not folder.is_dir():
        return "no such folder"
    conf = resources.files(CONF_MODULE)
    groups = {group.name for group in conf.iterdir() if group.is_dir()}
    files = [file for group in sorted(groups) for file in sorted((folder / group).glob("*.yaml"))]
    if not files:
        return f"has no recipe and no option: files such as exp/NAME.yaml; groups are {', '.join(sorted(groups))}"
    for file in files:
        # Of two files with one name, Hydra would silently take the first.
        if conf.joinpath(file.parent.name, file.name).is_file():
            return f"has {file.parent.name}/{file.name}, a name that is taken already; rename it"
    return None


@dataclass(slots=True)
class SortedOverrides:
    """The overrides of a command line, sorted."""

    accepted: list[str] = field(default_factory=list)  # overrides in a form that Hydra takes
    unknown: list[str] = field(default_factory=list)  # keys that the schema does not have
    problems: list[Problem] = field(default_factory=list)  # mistakes in the remaining overrides
    algorithm: str | None = None  # import path of the user's algorithm
    values: dict[str, str] = field(default_factory=dict)
    """All values as text by key, also wrong ones; a section set to {...} adds each of its keys too."""


def list_config_groups() -> Groups:
    """List the groups of conf/ and of added folders with their options."""
    options: Groups = {}
    for name in sorted(folder.name for folder in resources.files(CONF_MODULE).iterdir() if folder.is_dir()):
        groups = [group for folder in _list_folders() if (group := folder.joinpath(name)).is_dir()]
        files = [file.name for group in groups for file in group.iterdir() if file.name.endswith(".yaml")]
        if files:
            options[name] = sorted(file.removesuffix(".yaml") for file in files)
    return options


def is_built_in(path: str) -> bool:
    """True for a file of conf/ itself ("exp/quickstart")."""
    return resources.files(CONF_MODULE).joinpath(f"{path}.yaml").is_file()


def read_settings(path: str) -> dict[str, Any]:
    """Read the keys that a file of conf/ ("variant/dapo") sets itself."""
    file = next(file for folder in _list_folders() if (file := folder.joinpath(f"{path}.yaml")).is_file())
    text = file.read_text(encoding="utf-8")
    prefix = "" if "# @package _global_" in text else f"{path.rpartition('/')[0]}."
    return {key: value for key, value in flatten(yaml.safe_load(text) or {}, prefix) if key != "defaults"}


def read_overrides(arguments: Sequence[str]) -> SortedOverrides:
    """Sort arguments into overrides that Hydra takes, unknown keys and mistakes."""
    overrides, options = SortedOverrides(), list_config_groups()
    parser = OverridesParser.create()
    for argument in arguments:
        alias, _, value = argument.lstrip("+~").partition("=")
        name = ALIASES.get(alias, alias)
        text = argument.replace(alias, name, 1)
        overrides.values[name] = to_text(value)
        if text.startswith("~"):
            problem = _accept_deletion(overrides, text, name, options)
        else:
            problem = _check_form(text, name, value, options) or _accept(overrides, parser, text, options)
        if problem is not None:
            overrides.problems.append(problem)
    return overrides


def _check_form(text: str, name: str, value: str, options: Groups) -> Problem | None:
    if "=" not in text:
        advice = _advise_on_path(name)
        choices = {option: f"+{group}={option}" for group, names in options.items() for option in names}
        if advice is None and (close := difflib.get_close_matches(name, choices, n=1)):
            advice = f"did you mean {choices[close[0]]}?"
        advice = advice or f"write {f'{name}=...' if find_key(name) else 'key=value'}"
        return Problem(text, f"not understood; {advice}")
    if not name.strip():
        return Problem(text, "has no key before the =; write key=value")
    # Hydra's parser takes seconds for thousands of brackets; the type of a key says more than this message.
    if find_key(name) is None and measure_nesting(value) > MAX_NESTING:
        return Problem(f"{name}={to_text(value)}", f"has brackets within brackets, more than {MAX_NESTING} deep")
    return None


def _advise_on_path(word: str) -> str | None:
    """Name the key for a word that is a path or hub name."""
    kind = Path(word).suffix.lower()
    if kind in (".yaml", ".yml"):
        return f"job={word} takes the fields of a flat YAML; a recipe of your own is --config-dir=FOLDER +exp=NAME"
    if kind in (".jsonl", ".parquet", ".arrow", ".csv"):
        return f"write data.train_path={word}"
    return f"a model is policy.model.path={word}" if is_hub_name(word) or os.path.isdir(word) else None


def _accept(overrides: SortedOverrides, parser: OverridesParser, text: str, options: Groups) -> Problem | None:
    """Sort an argument into accepted or unknown, or return its problem."""
    name, _, text_value = text.lstrip("+").partition("=")
    override = _parse(parser, text, find_key(name), text_value)
    if isinstance(override, Problem):
        return override
    if override is None:
        literal = QuotedString(text=text_value, quote=Quote.single).with_quotes()
        overrides.accepted.append(f"++{name}={literal}")
        return None
    name, value = override.key_or_group, override.value()
    if isinstance(value, dict):
        overrides.values |= {key: to_text(leaf) for key, leaf in flatten(value, f"{name}.")}
    if name in options and not isinstance(value, dict):
        if name == "algorithm" and value not in options[name] and is_algorithm_name(str(value)):
            overrides.algorithm = str(value)
            return None
        if value not in options[name]:
            option, kind = to_text(value), "recipe" if name == RECIPES else "option"
            close = difflib.get_close_matches(option, options[name], n=1)
            close = close or [candidate for candidate in options[name] if option in candidate]
            hint = f"did you mean {close[0]}? " if close else ""
            return Problem(f"{name}={option}", f"no such {kind}; {hint}there is {', '.join(options[name])}")
        choice = f"{name}={value}"
        earlier = next((accepted for accepted in overrides.accepted if accepted.startswith(f"{name}=")), choice)
        if earlier != choice:
            # Hydra would silently take the last one.
            return Problem(f"{earlier} {choice}", f"a run takes one {name}; leave out the others")
        overrides.accepted.append(choice)
    elif find_key(name) or (is_section(name) and isinstance(value, dict)):
        # With ++, Hydra overrides or adds the key, whatever sign the user put before it.
        overrides.accepted.append("++" + text.lstrip("+"))
    elif is_match("env.<name>", name) and name.replace("env.", "env.<name>.", 1) in read_keys():
        key = name.replace("env.", "env.NAME.", 1)
        return Problem(text, f"is {key}; NAME is an environment's, such as the one that data.task_name names")
    elif is_section(name):
        return Problem(text, f"{name} is a section; set one of its keys: {', '.join(list_members(name))}")
    else:
        overrides.unknown += list_unknown_keys(name, value)
    return None


def _parse(parser: OverridesParser, text: str, key: str | None, text_value: str) -> Override | Problem | None:
    """Parse an argument as Hydra does; None: its value is literal text."""
    kind = read_keys()[key].type if key else None
    name = text.lstrip("+").partition("=")[0]
    is_too_deep = key is not None and measure_nesting(text_value) > MAX_NESTING
    try:
        override = None if is_too_deep else parser.parse_override(text)
        value = None if override is None else override.value()
    except (HydraException, ValueError, RecursionError):
        override = value = None  # ValueError: Python converts no number of thousands of digits
    subject = f"{name}={to_text(text_value)}"
    if override is None:
        if kind in _TEXT:
            is_half_quoted = any(
                text_value.startswith(quote) != text_value.endswith(quote) or text_value == quote for quote in "'\""
            )
            return Problem(text, "has a quote that is not closed") if is_half_quoted else None
        if kind is None:
            advice = "not understood; write key=value, with quotes around a value with other signs"
            return Problem(to_text(text), advice)
        advice = ", written [a,b], with quotes around each text" if "list" in kind else ""
        return Problem(subject, f"must be {kind}{advice}")
    if override.is_sweep_override():
        advice = f"a text with commas needs quotes: '{name}=\"...\"'" if kind in _TEXT else "lists are written [a,b]"
        return Problem(text, f"several values at once; a run takes one, and {advice}")
    if kind not in (None, FREE_TYPE) and isinstance(value, dict):
        return Problem(subject, f"must be {kind}")
    # run_dir=2026_01 is a text, although Python reads 2026_01 as a number.
    return None if kind in _TEXT and isinstance(value, bool | int | float) else override


def _accept_deletion(overrides: SortedOverrides, text: str, name: str, options: Groups) -> Problem | None:
    """Accept ~env.NAME, which removes an environment; other keys cannot be removed."""
    if "=" not in text and is_match("env.<name>", name):
        overrides.accepted.append(text)
        return None
    if name in options:
        return Problem(text, f"a group cannot be removed; choose another {name}, or set single keys")
    if key := find_key(name):
        return Problem(text, f"every key has a value; write {name}=..., {read_keys()[key].default_text} by default")
    if is_section(name):
        return Problem(text, f"would drop what the recipe sets in {name}; set single keys of it instead")
    overrides.unknown.append(name)
    return None


def measure_nesting(text: str) -> int:
    """Count the deepest nesting of brackets."""
    steps = {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}
    return max(itertools.accumulate((steps.get(character, 0) for character in text), initial=0))
