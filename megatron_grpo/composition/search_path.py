"""Where recipes and options of groups are looked for: in conf/, and in folders that a command line adds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

from megatron_grpo.config.errors import Problem, shown

CONF_MODULE = "megatron_grpo.conf"
"""The package of YAML files."""
OPTION = "--config-dir"
"""Adds a folder."""
SEARCH_KEY = "hydra.searchpath"
"""Adds several: hydra.searchpath=[FOLDER,...]."""
_FILE = "file://"

_added: ContextVar[tuple[Path, ...]] = ContextVar("added", default=())


def folders() -> list[Traversable]:
    """The folders of groups, conf/ first."""
    return [resources.files(CONF_MODULE), *_added.get()]


@contextlib.contextmanager
def searched(added: Sequence[Path]) -> Iterator[None]:
    """Look for options in these folders, too."""
    token = _added.set(tuple(added))
    try:
        yield
    finally:
        _added.reset(token)


def split_search_path(arguments: Sequence[str]) -> tuple[list[Path], list[str], list[Problem]]:
    """The folders that a command line adds, its other arguments, and what is wrong with the folders."""
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
                problems.append(Problem(f"{name}={shown(one)}", reason))
    return added, others, problems


def hydra_override(added: Sequence[Path]) -> list[str]:
    """What tells Hydra of the folders."""
    return [f"{SEARCH_KEY}=[{','.join(repr(_FILE + str(folder)) for folder in added)}]"] if added else []


def _listed(value: str) -> list[str]:
    try:
        given = yaml.safe_load(value)
    except yaml.YAMLError:
        given = value
    return [str(one) for one in (given if isinstance(given, list) else [given])]


def _unfit(folder: Path) -> str | None:
    """Why nothing can be chosen from a folder; None: something can."""
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
