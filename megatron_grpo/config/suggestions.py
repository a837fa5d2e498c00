"""Suggestions for unknown keys: other frameworks' names, and similar names."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from itertools import islice
from typing import Any

from megatron_grpo.config.algorithms import find_algorithm, find_reader, is_foreign_to
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import flatten, load_tables, read_keys
from megatron_grpo.config.loop_names import find_counterpart, translate_key

NONE = "none"  # section of foreign_names.yaml with names that have no counterpart, each with the reason
NOTHING_ALIKE = "unknown key; --cfg job shows all keys"  # text for a key without a suggestion
# Least similarity (difflib's ratio) of a suggested key: among all keys, and among those of the section that the user
# named. Less similar keys are not suggested, because a far-fetched name misleads.
_MISSPELT, _ALIKE = 0.9, 0.82
_MOST_SUGGESTED = 2
_MOST_LEAVES = 300  # of an unknown section that are looked at
_POLICY, _VALUE = "policy.", "value."


@functools.cache
def load_foreign_names() -> dict[str, Mapping[str, str]]:
    """Load other frameworks' names of settings, with their counterparts here."""
    tables = {
        framework: {
            name: counterpart.replace("*", name.rpartition(".")[2])
            for counterpart, names in table.items()
            for name in names.split()
        }
        for framework, table in load_tables("foreign_names.yaml").items()
    }
    return {**tables, "GrpoParameters": load_tables("job_fields.yaml")["settings"]}


def describe_unknown_key(name: str, algorithm: str) -> Problem:
    """Report an unknown key, with a suggestion in the algorithm's names."""
    if name.split(".")[0] == "hydra":
        return Problem(name, "Hydra's own settings have no effect here; run_dir chooses where a run writes")
    counterpart = describe_counterpart(name, algorithm)
    if counterpart is not None:
        return Problem(name, f"unknown key; {counterpart}")
    alike = find_similar_keys(name, algorithm)
    return Problem(name, f"unknown key; did you mean {' or '.join(alike)}?" if alike else NOTHING_ALIKE)


def list_unknown_keys(name: str, value: Any) -> list[str]:
    """List the settings in another framework's section; else the key itself."""
    leaves = flatten(value, f"{name}.") if isinstance(value, Mapping) else ()
    below = [leaf for leaf, _ in islice(leaves, _MOST_LEAVES)]
    return below if any(describe_counterpart(leaf, "grpo") for leaf in below) else [name]


def describe_counterpart(name: str, algorithm: str) -> str | None:
    """Name the counterpart of another framework's name; None if there is none.

    For example "TRL's learning_rate is policy.optimizer.lr here".
    """
    row = _find_row(name)
    if row is None and name.startswith(_VALUE):
        # A name of the value model has the counterpart of the policy's name, where the value model has such a key.
        row = _find_row(_POLICY + name.removeprefix(_VALUE))
        row = row and (row[0], name, " ".join(map(_to_value_key, row[2].split(" "))))
    if row is None:
        return None
    framework, foreign, text = row
    if framework == NONE:
        return text
    keys, _, remark = text.partition("; ")
    method = find_algorithm(algorithm)
    written = " and ".join(
        find_counterpart(method.section, key) or f"{key} (with algorithm={find_reader(key)})"
        if is_foreign_to(method, key)
        else translate_key(method.section, key)
        for key in keys.split()
    )
    return f"{framework}'s {foreign} is {written} here" + (remark and f": {remark}")


def _to_value_key(word: str) -> str:
    value_key = _VALUE + word.removeprefix(_POLICY)
    return value_key if word.startswith(_POLICY) and value_key in read_keys() else word


def _find_row(name: str) -> tuple[str, str, str] | None:
    """Find a name in foreign_names.yaml: framework, whole name, counterpart."""
    tables = load_foreign_names().items()
    rows = [(framework, foreign, text) for framework, table in tables for foreign, text in table.items()]
    # A name with dots may lack its first parts (megatron_cfg.optimizer.lr).
    for row in rows:
        if name == row[1] or ("." in name and row[1].endswith(f".{name}")):
            return row
    # A pattern (policy.megatron_cfg.*) stands for every other name of a section; the longest is the closest.
    patterns = [row for row in rows if row[1].endswith(".*") and f"{name}.".startswith(row[1].removesuffix("*"))]
    closest = max(patterns, key=lambda row: (len(row[1]), row[0]), default=None)
    return closest and (closest[0], name, closest[2])


def find_similar_keys(name: str, algorithm: str) -> list[str]:
    """List the keys that a misspelt name may stand for, best first."""
    section, _, rest = name.partition(".")
    environment, method = rest.partition(".")[0] if section == "env" else "", find_algorithm(algorithm)
    # Libraries check pass-through fields. Keys of `value`, which the policy has too, answer only names in that section.
    candidates = [
        translate_key(method.section, key).replace("<name>", environment or "NAME")
        for key in read_keys()
        if not key.endswith("<field>")
        and not is_foreign_to(method, key)
        and (section == "value" or not key.startswith(_VALUE))
    ]
    misspelt = difflib.get_close_matches(name, candidates, n=1, cutoff=_MISSPELT)
    if misspelt:
        return misspelt
    # Parts of a name alone suggest nothing: another framework's `….enabled` or `….name` is seldom one of ours.
    if rest:
        beside = [key for key in candidates if key.partition(".")[0] == section]
        return difflib.get_close_matches(name, beside, n=_MOST_SUGGESTED, cutoff=_ALIKE)
    without_section = {key: key.partition(".")[2] for key in candidates}
    words = difflib.get_close_matches(name, set(without_section.values()), n=1, cutoff=_MISSPELT)
    similar = [key for key in candidates if without_section[key] in words]
    ending = [key for key in candidates if key.rpartition(".")[2] in words]
    return similar if len(ending) <= _MOST_SUGGESTED else []  # enabled, name and path are the end of many keys
