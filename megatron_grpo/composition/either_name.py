"""Brings together what a configuration says under the two names of the keys that GRPO and PPO share.

What stands on the command line counts more than what a file says, and of two files of conf/ the later one. Whoever says
both names in one place, with different values, is asked which of them is meant.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megatron_grpo.composition.overrides import settings_of
from megatron_grpo.config.changes import leaves
from megatron_grpo.config.errors import Problem, shown
from megatron_grpo.config.keys import known_key
from megatron_grpo.config.loop_keys import LOOPS, SHARED, is_shared, other_than
from megatron_grpo.config.schema import Config


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
