"""Suggestions for keys that the schema does not have: counterparts of other frameworks' names, and typing errors."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from typing import Any

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import flatten, load_tables, read_keys
from megatron_grpo.config.loop_schema import COUNTERPART, is_foreign_to, switch_algorithm, translate_key

NONE = "none"
"""Section of foreign_names.yaml with names that have no counterpart, each with the reason."""


@functools.cache
def load_foreign_names() -> dict[str, Mapping[str, str]]:
    """Names of settings in other frameworks and in job files with their counterparts here, by framework."""
    return {**load_tables("foreign_names.yaml"), "GrpoParameters": load_tables("job_fields.yaml")["settings"]}


_MISSPELT, _ALIKE = 0.9, 0.82
"""Least similarity (difflib's ratio) of a suggested key: among all keys, and among those of the section that the user
named. Less similar keys are not suggested, because a far-fetched name misleads."""
_MOST_SUGGESTED = 2
NOTHING_ALIKE = "unknown key; --cfg job shows all keys"
"""Text for a key without a suggestion."""


def describe_unknown_key(name: str, algorithm: str) -> Problem:
    """The complaint about a key that the schema does not have.

    Args:
        name: dotted name of the unknown key.
        algorithm: the algorithm that runs; suggestions use its names.
    """
    if name.split(".")[0] == "hydra":
        return Problem(name, "Hydra's own settings have no effect here; run_dir chooses where a run writes")
    foreign = describe_counterpart(name, algorithm)
    if foreign is not None:
        return Problem(name, f"unknown key; {foreign}")
    alike = find_similar_keys(name, algorithm)
    return Problem(name, f"unknown key; did you mean {' or '.join(alike)}?" if alike else NOTHING_ALIKE)


def list_unknown_keys(name: str, value: Any) -> list[str]:
    """Names of the settings in an unknown section of another framework; of any other unknown key, its own name."""
    below = [leaf for leaf, _ in flatten(value, f"{name}.")] if isinstance(value, Mapping) else []
    return below if any(describe_counterpart(leaf, "grpo") for leaf in below) else [name]


def describe_counterpart(name: str, algorithm: str) -> str | None:
    """A clause with the counterpart of a foreign name ("TRL's learning_rate is policy.optimizer.lr here"), or None.

    A name with dots may lack its first parts (megatron_cfg.optimizer.lr). A name of the value model has the counterpart
    of the policy's name. Exact names go before those that a pattern (policy.megatron_cfg.*) stands for.
    """
    entry = _entry(name)
    if entry is None and name.startswith(_VALUE):
        entry = _entry(_POLICY + name.removeprefix(_VALUE))
        entry = entry and (entry[0], name, " ".join(_of_value(word) for word in entry[2].split(" ")))
    if entry is None:
        return None
    framework, foreign, ours = entry
    if framework == NONE:
        return ours
    here, _, remark = ours.partition("; ")
    if not here:
        return f"{framework}'s {foreign} has no counterpart here; leave it out"
    return f"{framework}'s {foreign} is {_here(here.split(), algorithm)} here" + (remark and f": {remark}")


_POLICY, _VALUE = "policy.", "value."
_ANY = ".*"
"""End of a foreign name that stands for every name of a section."""


def _entry(name: str) -> tuple[str, str, str] | None:
    """Framework, whole foreign name and counterpart (of foreign_names.yaml) of a name; None: no framework has it."""
    for framework, table in load_foreign_names().items():
        for foreign, ours in table.items():
            if name == foreign or ("." in name and foreign.endswith(f".{name}")):
                return framework, foreign, ours
    patterns = (
        (len(foreign), framework, ours)
        for framework, table in load_foreign_names().items()
        for foreign, ours in table.items()
        if foreign.endswith(_ANY) and f"{name}.".startswith(foreign.removesuffix("*"))
    )
    closest = max(patterns, default=None)
    return closest and (closest[1], name, closest[2])


def _of_value(key: str) -> str:
    """The value model's key for a key of the policy; other words, and keys that it does not have, as they are."""
    of_value = _VALUE + key.removeprefix(_POLICY)
    return of_value if key.startswith(_POLICY) and of_value in read_keys() else key


def find_similar_keys(name: str, algorithm: str) -> list[str]:
    """The keys of a run of an algorithm that a misspelt name stands for, best first; empty: none.

    A name without a dot is also compared with keys without their section. Parts of a name alone suggest nothing:
    another framework's `….enabled` or `….name` is seldom one of ours.
    """
    known = _names_in(algorithm, name)
    misspelt = difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
    if misspelt:
        return misspelt
    section = name.rpartition(".")[0]
    if section:
        beside = [key for key in known if key.partition(".")[0] == name.partition(".")[0]]
        return difflib.get_close_matches(name, beside, n=_MOST_SUGGESTED, cutoff=_ALIKE)
    without = {key: key.partition(".")[2] for key in known}
    words = difflib.get_close_matches(name, set(without.values()), n=1, cutoff=_MISSPELT)
    found = [key for key in known if without[key] in words]
    ending = [key for key in known if key.rpartition(".")[2] in words]
    return found if len(ending) <= _MOST_SUGGESTED else []  # enabled, name and path are the end of many keys


def _names_in(algorithm: str, name: str) -> list[str]:
    """The keys that may be suggested for a name.

    A key of an environment carries the name of the environment that the user wrote. The value model's keys, whose names
    are the policy's too, are suggested only for a name that begins with `value`.
    """
    section, _, rest = name.partition(".")
    environment = rest.partition(".")[0] if section == "env" else ""
    own = (
        key for key in read_keys() if not key.endswith("<field>")
    )  # pass-through fields are checked by their library
    names = (translate_key(algorithm, key) for key in own if not is_foreign_to(algorithm, key))
    names = (one for one in names if section == "value" or not one.startswith("value."))
    return [one.replace("<name>", environment or "NAME") for one in names]


def _here(ours: list[str], algorithm: str) -> str:
    """Our keys for a foreign setting, in words; a key that only the other algorithm reads is marked as such."""
    return " and ".join(
        COUNTERPART.get(key) or f"{key} (with algorithm={switch_algorithm(algorithm)})"
        if is_foreign_to(algorithm, key)
        else translate_key(algorithm, key)
        for key in ours
    )
