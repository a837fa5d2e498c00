"""Suggestions for keys that the schema does not have."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from dataclasses import dataclass

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import data_file, keys
from megatron_grpo.config.loop_schema import COUNTERPART, is_foreign_to, named_for, other_than

foreign_names = functools.cache(functools.partial(data_file, "foreign_names.yaml"))
"""Names of settings in TRL, NeMo RL and verl with our keys, by framework; "none" has names without a counterpart."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A setting of another framework and its counterparts here."""

    framework: str
    name: str
    """Name of the setting in the other framework."""
    keys: tuple[str, ...]
    """Keys of this configuration with the same meaning."""


def translated(name: str) -> Translation | None:
    """The counterpart of a foreign name, which may be given without its first parts (megatron_cfg.optimizer.lr)."""
    return _first(lambda foreign: name == foreign or ("." in name and foreign.endswith(f".{name}")))


def _first(fits: Callable[[str], bool]) -> Translation | None:
    for framework, table in foreign_names().items():
        for foreign, ours in table.items():
            if framework != "none" and fits(foreign):
                return Translation(framework, foreign, tuple(ours.split()))
    return None


_MISSPELT, _ALIKE, _ALIKE_IN_SECTION, _ALIKE_SECTIONS = 0.9, 0.8, 0.7, 0.55
"""Least similarity (difflib's ratio) of a suggested key: by its whole name, as the only suggestion; by its whole name;
by its whole name, in the section that the user named; and by its section, if it ends in the same word. Less similar
keys are not suggested, because a far-fetched name misleads."""
_MOST_SUGGESTED = 2


def unknown_key(name: str, algorithm: str) -> Problem:
    """The complaint about a key that the schema does not have.

    Args:
        name: dotted name of the unknown key.
        algorithm: the algorithm that runs; suggestions use its names.
    """
    if name.split(".")[0] == "hydra":
        return Problem(name, "Hydra's own settings have no effect here; run_dir chooses where a run writes")
    foreign = translated(name)
    if foreign is not None:
        return Problem(name, f"unknown key; {foreign.framework}'s {foreign.name} is {_here(foreign, algorithm)} here")
    absent = foreign_names()["none"]
    for part in reversed(name.split(".")):
        if part in absent:
            return Problem(name, f"unknown key; {absent[part]} is not supported")
    alike = nearest(name, algorithm)
    if alike:
        return Problem(name, f"unknown key; did you mean {' or '.join(alike)}?")
    word = name.rpartition(".")[2]
    foreign = _first(lambda foreign: foreign == word) or _first(lambda foreign: foreign.endswith(f".{word}"))
    if foreign is not None:
        return Problem(name, f"unknown key; did you mean {_here(foreign, algorithm)}?")
    return Problem(name, "unknown key; --cfg job shows all keys")


def nearest(name: str, algorithm: str) -> list[str]:
    """The keys of a run of an algorithm that are most like a name, best first; empty when none is."""
    known = _names_in(algorithm, name)
    misspelt = difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
    if misspelt:
        return misspelt
    section, word = name.rpartition(".")[0], name.rpartition(".")[2]
    same_word = [key for key in known if key.rpartition(".")[2] == word]
    if section:
        sections = {key.rpartition(".")[0]: key for key in same_word}
        close = difflib.get_close_matches(section, sections, n=1, cutoff=_ALIKE_SECTIONS)
        beside = [key for key in known if key.partition(".")[0] == name.partition(".")[0]]
        return (
            [sections[one] for one in close]
            or difflib.get_close_matches(name, beside, n=_MOST_SUGGESTED, cutoff=_ALIKE_IN_SECTION)
            or difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
        )
    if not same_word:
        words = difflib.get_close_matches(word, {key.rpartition(".")[2] for key in known}, n=1, cutoff=_ALIKE)
        same_word = [key for key in known if key.rpartition(".")[2] in words]
    return same_word if len(same_word) <= _MOST_SUGGESTED else []


def _names_in(algorithm: str, name: str) -> list[str]:
    """The keys that may be suggested for a name.

    A key of an environment carries the name of the environment that the user wrote. The value model's keys, whose names
    are the policy's too, are suggested only for a name that begins with `value`.
    """
    section, _, rest = name.partition(".")
    environment = rest.partition(".")[0] if section == "env" else ""
    own = (key for key in keys() if not key.endswith("<field>"))  # pass-through fields are checked by their library
    names = (named_for(algorithm, key) for key in own if not is_foreign_to(algorithm, key))
    names = (one for one in names if section == "value" or not one.startswith("value."))
    return [one.replace("<name>", environment or "NAME") for one in names]


def _here(foreign: Translation, algorithm: str) -> str:
    """Our keys for a foreign setting, in words; a key that only the other algorithm reads is marked as such."""
    return " and ".join(
        COUNTERPART.get(key) or f"{key} (with algorithm={other_than(algorithm)})"
        if is_foreign_to(algorithm, key)
        else named_for(algorithm, key)
        for key in foreign.keys
    )
