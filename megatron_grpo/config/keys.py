"""Every key of the schema with its type, default and docstring, read once for messages, help and the reference page."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import textwrap
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from pydantic.fields import FieldInfo

from megatron_grpo.config.schema import MISSING, Config

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the configuration."""

    name: str
    """Dotted; a part in angle brackets stands for a name that the user chooses."""
    type: str
    """For people: "int > 0", "one of linear, cosine", "text or null"."""
    default: Any
    doc: str

    @property
    def default_text(self) -> str:
        """The default as it is written in YAML; "required" when there is none."""
        if self.default == MISSING:
            return "required"
        return self.default if isinstance(self.default, str) else json.dumps(self.default)


@dataclass(frozen=True, slots=True)
class Group:
    """One section of the configuration."""

    name: str
    """Dotted; empty for the top level."""
    doc: str
    keys: tuple[Key, ...]
    """Its own leaves, without those of the sections below it."""


@functools.cache
def groups() -> tuple[Group, ...]:
    """All sections, in the order of the schema."""
    return tuple(_walk(Config, "", inspect.getdoc(Config) or "", Config()))


@functools.cache
def keys() -> dict[str, Key]:
    """All leaves by name, in the order of the schema."""
    return {key.name: key for group in groups() for key in group.keys}


def known_key(name: str) -> str | None:
    """The schema's name of a leaf ("env.math.type" -> "env.<name>.type"); None when there is no such leaf."""
    return next((key for key in keys() if matches(key, name)), None)


def known_section(name: str) -> bool:
    """Whether a dotted name is a group of keys."""
    return (bool(name) and any(matches(group.name, name) for group in groups())) or name == "env"


def nearest(name: str) -> str | None:
    """The key a user most likely meant: similar as a whole, or the only one that ends in the same word."""
    close = difflib.get_close_matches(name, keys(), n=1, cutoff=0.75)
    if close:
        return close[0]
    word = name.rpartition(".")[2]
    same_word = [key for key in keys() if key.rpartition(".")[2] == word]
    # The policy has keys of the same names as the value model, and is meant more often; so with GRPO and PPO.
    same_word = [key for key in same_word if not key.startswith(("ppo.", "value."))] or same_word
    if same_word:
        return difflib.get_close_matches(name, same_word, n=1, cutoff=0.0)[0]
    close = difflib.get_close_matches(name, keys(), n=1, cutoff=0.6)
    return close[0] if close else None


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name is what the schema writes as `pattern`: "env.math" is "env.<name>"."""
    expected, parts = pattern.split("."), name.split(".")
    return len(expected) == len(parts) and all(
        e == p or e.startswith("<") for e, p in zip(expected, parts, strict=True)
    )


def _walk(section: type, prefix: str, doc: str, defaults: Any) -> list[Group]:
    """The groups of a section; `defaults` is the section as the one above it makes it."""
    docs = _field_docs(section)
    hints = typing.get_type_hints(section, include_extras=True)
    own: list[Key] = []
    below: list[Group] = []
    for field in dataclasses.fields(section):
        hint, name = hints[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            text = docs.get(field.name) or inspect.getdoc(hint) or ""
            below += _walk(hint, f"{name}.", text, getattr(defaults, field.name))
        elif typing.get_origin(hint) is dict:
            kind = typing.get_args(hint)[1]
            below += _walk(kind, f"{name}.<name>.", docs.get(field.name, ""), kind())
        else:
            own.append(Key(name, _describe(hint), getattr(defaults, field.name), docs.get(field.name, "")))
    return [Group(prefix.rstrip("."), doc, tuple(own)), *below]


def _field_docs(section: type) -> dict[str, str]:
    """Docstrings under the fields of a class and of those it inherits from, which Python itself throws away."""
    docs: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _own_field_docs(base)
    return docs


def _own_field_docs(section: type) -> dict[str, str]:
    (class_def,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(class_def, ast.ClassDef)
    docs = {}
    for statement, following in zip(class_def.body, class_def.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = following.value.value if _is_text(following) else None
            if isinstance(text, str):
                docs[statement.target.id] = inspect.cleandoc(text)
    return docs


def _is_text(statement: ast.stmt) -> typing.TypeGuard[Any]:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return f"{_describe(args[0])} " + " and ".join(f"{_BOUNDS[b]} {v:g}" for b, v in _bounds(args[1:]))
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(arg) for arg in args)
    if origin is list:
        return f"list of {_describe(args[0])}"
    return {int: "int", float: "float", bool: "true or false", str: "text", type(None): "null"}[hint]


def _bounds(metadata: tuple[Any, ...]) -> list[tuple[str, float]]:
    constraints = [c for info in metadata if isinstance(info, FieldInfo) for c in info.metadata]
    return [(bound, getattr(c, bound)) for c in constraints for bound in _BOUNDS if hasattr(c, bound)]
