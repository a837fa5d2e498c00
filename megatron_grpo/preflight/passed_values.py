"""Whether a value that is passed on to another package is of the type that the package says it has."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError


class Unwritable:
    """Stands in a type for what no YAML value is: a class of the package's own, a function."""


def refusal(kind: Any, value: Any) -> str | None:
    """What is wrong with a value, in words; None: it is of the type.

    Args:
        kind: a type of builtins, Literal, Union and `Unwritable`.
        value: as YAML gives it. A list is also a tuple, an int also a float, and a bool is no number.
    """
    given = tuple(value) if isinstance(value, list) and _has_tuple(kind) else value
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True)).validate_python(given)
    except ValidationError:
        return f"must be {in_words(kind)}"
    return None


def in_words(kind: Any) -> str:
    """A type for a message: "true or false", "int or null", "one of fp32, fp64 or null"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in args if writable(one)))
    if origin is typing.Annotated:
        return in_words(args[0])
    if origin in (list, tuple):
        return f"list of {in_words(args[0])}"
    if origin is dict or kind is dict:
        return "a mapping"
    return {bool: "true or false", str: "text", type(None): "null"}.get(kind) or str(getattr(kind, "__name__", kind))


def writable(kind: Any) -> bool:
    """Whether some YAML value but null is of a type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(writable(one) for one in args if one is not type(None))
    return not (kind is Unwritable or origin in (type, typing.get_origin(typing.Callable[..., Any])))


def _has_tuple(kind: Any) -> bool:
    return kind is tuple or typing.get_origin(kind) is tuple or any(_has_tuple(one) for one in typing.get_args(kind))
