"""Checks of the fields that users pass on to libraries, against the installed library's own dataclasses."""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from megatron_grpo.config.errors import Problem, suggest_name, to_text
from megatron_grpo.config.keys import describe_type, load_tables
from megatron_grpo.config.schema import Config

# By section: the fields that the run sets itself, each with what the user does instead.
OWNED = {
    section: {name: advice for advice, names in table.items() for name in names.split()}
    for section, table in load_tables("owned_fields.yaml").items()
}


def select_passed_fields(config: Config) -> dict[str, dict[str, Any]]:
    """Select the fields that the user passes on, by section."""
    sections = {f"policy.{name}": getattr(config.policy, name) for name in ("megatron", "ddp", "megatron_optimizer")}
    sections["generation.engine_args"] = config.generation.engine_args
    return {section: dict(values) for section, values in sections.items() if values}


def check_owned_fields(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """Report fields, as `select_passed_fields` returns them, that the run sets itself."""
    for section, values in sections.items():
        for name, value in values.items():
            if name in OWNED[section]:
                yield Problem(f"{section}.{name}={to_text(value)}", f"is set by the run itself: {OWNED[section][name]}")


def check_library_fields(
    section: str, values: Mapping[str, Any], annotations: Mapping[str, Any], kind: str
) -> Iterator[Problem]:
    """Report fields of a section that the library lacks or has with another type.

    `annotations` has the type of every field of the library's dataclass, and `kind` is a field's name in messages, such
    as "an argument of the installed vLLM".
    """
    # Importing a library takes seconds and loads torch: callers are in trainer/ and generation/, in their own process.
    free = {name for name in annotations if not name.startswith("_")} - OWNED[section].keys()
    for name, value in values.items():
        text = _find_mismatch(annotations[name], value) if name in free else None
        if name not in free and name not in OWNED[section]:
            text = f"is not {kind}" + suggest_name(name, sorted(free), f"{section}.{{}}", otherwise="")
        if text is not None:
            yield Problem(f"{section}.{name}={to_text(value)}", text)


def _find_mismatch(annotation: Any, value: Any) -> str | None:
    kind = _simplify(annotation)
    if kind in (_Unwritable, type(None)):
        name = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
        return f"takes a {name}, which a configuration cannot hold"
    try:
        # As JSON, in which a list is also a tuple, and no text is a number.
        TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True)).validate_json(json.dumps(value))
    except ValidationError:
        return f"must be {describe_type(kind)}"
    except PydanticSchemaGenerationError:
        return None
    kinds = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    settings = {field.name for kind in kinds if is_dataclass(kind) for field in fields(kind)}
    wrong = next((name for name in value if name not in settings), None) if isinstance(value, dict) else None
    if not settings or wrong is None:
        return None
    return f"has {wrong}, which is not a setting of it" + suggest_name(str(wrong), sorted(settings), otherwise="")


class _Unwritable:
    """Stands for a type without YAML values, such as a function."""


def _simplify(kind: Any) -> Any:
    """Turn a library's type into the type of its YAML values."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _is_union(kind):
        members = [member for member in map(_simplify, args) if member is not _Unwritable]
        only_none = all(member is type(None) for member in members)
        return _Unwritable if only_none else typing.Union[tuple(members)]  # noqa: UP007  made from a tuple
    if origin is typing.Annotated:
        return _simplify(args[0])
    if isinstance(kind, str | typing.ForwardRef):
        return Any  # a name that the library imports for type checkers alone
    if origin is set:
        return list[_simplify(args[0])]  # type: ignore[misc,unused-ignore]
    if origin in (list, dict, tuple):
        return origin[tuple(arg if arg is ... else _simplify(arg) for arg in args)]
    if isinstance(kind, enum.EnumType):
        return Literal[tuple(kind.__members__)]  # type: ignore[misc,unused-ignore]
    if isinstance(kind, type) and is_dataclass(kind):
        return dict[str, Any]
    if getattr(kind, "__module__", "") == "torch" and kind.__name__ == "dtype":
        return Literal["float32", "bfloat16", "float16"]
    is_builtin = kind in (Any, object, bool, int, float, str, list, dict, tuple, None, type(None))
    return kind if is_builtin or origin is Literal else _Unwritable


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)
