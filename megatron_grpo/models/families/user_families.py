"""Families of the user's own code, which every process of a run imports when it reads a model."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any, get_args

from megatron_grpo.config.paths import FAMILIES_VARIABLE, import_value, set_family_environment
from megatron_grpo.models.families.family import Family
from megatron_grpo.models.shape import LayerKind, ModelShape
from megatron_grpo.models.weight_axes import LABELS, list_names, split_sections
from megatron_grpo.models.weight_map import WeightEntry, map_rows

_NOTHING = "[[], []]"
_ROW_FORM = "kind: parameter [axes] = tensor [axes] + tensor [axes]"


def share_families(paths: Collection[str], folders: Sequence[str]) -> None:
    """Name the user's families for this process and those that it starts."""
    set_family_environment({FAMILIES_VARIABLE: json.dumps([sorted(set(paths)), list(folders)])} if paths else {})


def is_shared(path: str) -> bool:
    """True if this process, or one that started it, has named a family."""
    return path in json.loads(os.environ.get(FAMILIES_VARIABLE, _NOTHING))[0]


def list_user_families() -> tuple[Family, ...]:
    """List the user's families; ValueError names one that cannot be imported."""
    return _load_families(os.environ.get(FAMILIES_VARIABLE, _NOTHING))


@cache
def _load_families(text: str) -> tuple[Family, ...]:
    paths, folders = json.loads(text)
    try:
        return tuple(load_family(path, tuple(folders)) for path in paths)
    except ValueError as error:  # on another machine than that of the start
        raise ValueError(f"family {' or '.join(paths)} {error}") from None


@cache
def load_family(path: str, folders: tuple[str, ...] = ()) -> Family:
    """Import a family, once a process; ValueError: unusable."""
    value = import_value(path, folders)
    for reason in _find_faults(value):
        raise ValueError(reason)
    family: Family = replace(value, read=partial(_read_sizes, path, value))
    return family


def _find_faults(value: Any) -> Iterator[str]:
    """Find what keeps a value from being a family."""
    if not isinstance(value, Family):
        yield f"is {type(value).__name__}, not a megatron_grpo.models.families.family.Family"
        return
    for name in ("name", "architecture"):
        if not isinstance(getattr(value, name), str) or not getattr(value, name):
            yield f"has {name}={getattr(value, name)!r}, which must be a text"
    read: Any = value.read
    if not callable(read):
        yield f"has read={read!r}, which must be a function from the contents of a config.json to a ModelShape"
    if not isinstance(value.tables, tuple | list) or not value.tables:
        yield "has no tuple of texts as tables; of a single table it is (TABLE,)"
        return
    for table in value.tables:
        try:
            rows = list(map_rows(table))
            for axis in chain.from_iterable(map(_list_axes, rows)):
                split_sections(axis)  # parses it
        except (ValueError, TypeError, SyntaxError):
            yield f"has a table that is not rows of the form {_ROW_FORM!r}: {str(table).strip()!r}"
            continue
        kinds = get_args(LayerKind)
        for row in (row for row in rows if row.kind not in kinds):
            yield f"has a row of {row.name} for layers of the kind {row.kind}; kinds are {', '.join(kinds)}"


def _read_sizes(path: str, family: Family, raw: dict[str, Any]) -> ModelShape:
    """Read a model's sizes by the user's function."""
    try:
        shape = family.read(raw)
    except ValueError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise ValueError(f"family {path}: read raised {type(error).__name__}: {error}") from error
    if not isinstance(shape, ModelShape):
        raise ValueError(f"family {path}: read returned {type(shape).__name__}, not a ModelShape")
    kinds = {kind for layer in range(shape.layers) for kind in shape.list_kinds(layer)}
    for row in (row for table in family.tables for row in map_rows(table) if row.kind in kinds):
        factors = {name for axis in _list_axes(row) for name in list_names(axis)}
        if unknown := factors - shape.sizes.keys() - LABELS:
            sizes = ", ".join(shape.sizes)
            raise ValueError(f"family {path}: the row of {row.name} has the factor {min(unknown)}; sizes are {sizes}")
    return replace(shape, family=family.name)


def _list_axes(row: WeightEntry) -> Iterator[str]:
    for axes in (row.axes, *(tensor.dims for tensor in row.hf)):
        yield from axes
