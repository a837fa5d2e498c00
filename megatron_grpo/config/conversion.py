"""Turns plain values into a typed Config; a value of a wrong type or range is reported and replaced by its default."""

from __future__ import annotations

import typing
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.keys import describe_type, find_key, flatten, list_members, read_keys
from megatron_grpo.config.schema import MISSING, Config
from megatron_grpo.config.suggestions import describe_unknown_key, list_unknown_keys

_ADAPTER = TypeAdapter(Config)

_OF_LISTS = {
    "data.train_path": "; several sets are data.train_sets.NAME.path=...",
    "data.val_path": "; several sets are data.val_sets.NAME.path=...",
}
"""Advice where a list is given instead of one path."""


def convert_values(values: dict[str, Any], algorithm: str) -> tuple[Config | None, list[Problem]]:
    """The values as a Config (None if defaults do not make them valid), and their problems.

    Args:
        values: values by key; wrong ones are removed in place, so that their keys take their defaults.
        algorithm: the algorithm that runs; suggestions for unknown keys use its names.
    """
    problems = _booleans(values)
    for _ in range(2):
        try:
            return _ADAPTER.validate_python(values), problems
        except ValidationError as error:
            details = error.errors(include_url=False)
        for detail in details:
            problems += _problems(detail, algorithm)
            _remove(values, detail["loc"])
    return None, problems


def convert_argument(name: str, text: str, kind: Any) -> Any:
    """The value of a command's own argument NAME=TEXT, for a type of the schema; a list is written [a,b].

    Raises:
        ValueError: the text is not a value of this type.
    """
    value = text.removeprefix("[").removesuffix("]").split(",") if typing.get_origin(kind) is list else text
    try:
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        raise ValueError(f"{name}={to_text(text)} must be {describe_type(kind)}") from None


def find_missing_keys(values: dict[str, Any], already: set[str]) -> list[Problem]:
    """Required keys without a value that no other problem names."""
    given = dict(flatten(values))
    replaced = {"data.train_path"} if any(name.startswith("data.train_sets") for name in given) else set()
    return [
        Problem(name, f"is required: {' '.join(key.doc.split())}")
        for name, key in read_keys().items()
        if name not in already | replaced and "<" not in name and given.get(name) == MISSING
    ]


def _booleans(values: dict[str, Any]) -> list[Problem]:
    """Remove booleans given for numbers or texts, which pydantic would read as 1 and 0, and report them."""
    wrong = []
    for name, value in list(flatten(values)):
        key = find_key(name) if isinstance(value, bool) else None
        if key is not None and "true or false" not in read_keys()[key].type:
            wrong.append(Problem(f"{name}={value}", f"must be {read_keys()[key].type}"))
            _remove(values, tuple(name.split(".")))
    return wrong


def _problems(detail: ErrorDetails, algorithm: str) -> list[Problem]:
    """The problems in words: of an unknown section of another framework, one for each of its settings."""
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        name = ".".join(str(part) for part in detail["loc"])
        return [describe_unknown_key(one, algorithm) for one in list_unknown_keys(name, detail["input"])]
    return [_misfit(detail)]


def _misfit(detail: ErrorDetails) -> Problem:
    """The problem of a value that does not fit its key."""
    name = ".".join(str(part) for part in detail["loc"])
    subject = f"{name}={to_text(detail['input'])}"
    key = find_key(name)
    if key is not None:
        hint = _OF_LISTS.get(name, "") if isinstance(detail["input"], list) else ""
        return Problem(subject, f"must be {read_keys()[key].type}{hint}")
    whole = find_key(".".join(str(part) for part in detail["loc"][:-1]))
    if whole is not None:
        return Problem(subject, f"is an element of what must be {read_keys()[whole].type}")
    found = list_members(name)
    return Problem(subject, f"must be a section with keys of its own{': ' if found else ''}{', '.join(found)}")


def _remove(values: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    """Delete a wrong value; a list with a wrong element goes as a whole."""
    node: Any = values
    for part in loc[:-1]:
        if not isinstance(node.get(part), dict):
            node.pop(part, None)
            return
        node = node[part]
    node.pop(loc[-1], None)
