"""Every key of the schema with its type, default and docstring."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from operator import attrgetter
from typing import Any, Literal

import yaml
from pydantic.fields import FieldInfo

from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.loop_names import SHARED, is_shared, translate_key
from megatron_grpo.config.loop_schema import LOOPS, GRPOConfig, LoopConfig, SampledLoopConfig
from megatron_grpo.config.schema import MISSING, Config
from megatron_grpo.config.section import (
    EnvironmentOptions,
    FormulaOptions,
    MegatronFields,
    TemplateArguments,
    VllmArguments,
    flatten,
)

# Type of pass-through fields, which Megatron-Core, vLLM or an environment checks.
FREE_TYPE = "true or false, number, text, list or mapping"
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the configuration."""

    name: str
    """Dotted name, GRPO's if algorithms share the key; <name> stands for a name that the user chooses."""
    type: str  # in words: "int > 0", "one of linear, cosine", "text or null"
    default: Any
    doc: str

    @property
    def default_text(self) -> str:
        """The default in YAML, with those of algorithms that differ; "required" without one."""
        if self.default == MISSING:
            return "required"
        key_in_loop = attrgetter(self.name.partition(".")[2])
        loops = _list_sharing_loops(self.name)
        defaults = {"": self.default} | {f", with {loop} ": key_in_loop(LOOPS[loop]()) for loop in loops}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in defaults.items()}
        return "".join(key + text for key, text in texts.items() if not key or text != texts[""])


@dataclass(frozen=True, slots=True)
class SectionKeys:
    """One section of the configuration, without the sections below it."""

    name: str  # dotted name, GRPO's if algorithms share the section; empty for the top level
    doc: str
    keys: tuple[Key, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """One name, or one for each algorithm that shares the section."""
        loops = _list_sharing_loops(self.keys[0].name if self.keys else self.name)
        return tuple(loop + self.name.removeprefix("grpo") for loop in loops) or (self.name,)


def _list_sharing_loops(key: str) -> list[str]:
    return [loop for loop in LOOPS if ALGORITHMS[loop].has_read(key)] if is_shared(key) else []


@functools.cache
def read_sections() -> tuple[SectionKeys, ...]:
    """Read all sections, in the order of the schema."""
    return tuple(_list_sections(Config, "", "", Config()))


@functools.cache
def read_keys() -> dict[str, Key]:
    """Read all keys by name, in the order of the schema."""
    return {key.name: key for section in read_sections() for key in section.keys}


def find_key(name: str) -> str | None:
    """Find a key's name in the schema ("env.math.type" -> "env.<name>.type")."""
    name = translate_key("grpo", name)
    if name in read_keys():
        return name
    # Names that the user chooses are parts in angle brackets.
    return next((key for key in read_keys() if "<" in key and is_match(key, name)), None)


def is_section(name: str) -> bool:
    """True if a dotted name is a section of keys."""
    name = translate_key("grpo", name)
    patterns = [pattern for section in read_sections() for pattern in section.names]
    parents = [pattern.removesuffix(".<name>") for pattern in patterns if pattern.endswith(".<name>")]
    return bool(name) and any(is_match(pattern, name) for pattern in (*patterns, *parents))


def list_members(name: str) -> list[str]:
    """List the keys and the sections of a section."""
    name, members = translate_key("grpo", name), []  # in the order of the schema
    for section in read_sections():
        if any(is_match(pattern, name) for pattern in section.names):
            members += [key.name.rpartition(".")[2] for key in section.keys]
        elif any(is_match(pattern.rpartition(".")[0], name) for pattern in section.names):
            members.append(section.name.rpartition(".")[2])
    return members


def is_match(pattern: str, name: str) -> bool:
    """True if a dotted name fits a pattern ("env.math" fits "env.<name>")."""
    expected, parts = pattern.split("."), name.split(".")
    return len(expected) == len(parts) and all(
        name == part or name.startswith("<") for name, part in zip(expected, parts, strict=True)
    )


def _list_sections(section: type, prefix: str, doc: str, defaults: Any) -> list[SectionKeys]:
    """List a section and those below it, shared keys before GRPO's own.

    `prefix` begins the names of its keys; `doc`, unless it is empty, replaces the docstring of the class.
    """
    # The shared keys are sections of their own under GRPO's name, so that each is listed once.
    common = LoopConfig.__dataclass_fields__
    already_listed = common if section is SampledLoopConfig else SHARED if section in LOOPS.values() else ()
    docs = _read_field_docs(section)
    hints = typing.get_type_hints(section, include_extras=True)
    keys: list[Key] = []
    below: list[SectionKeys] = []
    for field in dataclasses.fields(section):
        hint, name, text = hints[field.name], f"{prefix}{field.name}", docs.get(field.name, "")
        if field.name in already_listed:
            continue
        if name in LOOPS:
            for loop in (LoopConfig, SampledLoopConfig, GRPOConfig) if name == "grpo" else (LOOPS[name],):
                below += _list_sections(loop, f"{name}.", text, LOOPS[name]())
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            below += _list_sections(hint, f"{name}.", text, getattr(defaults, field.name))
        elif hint in (EnvironmentOptions, FormulaOptions, MegatronFields, TemplateArguments, VllmArguments):
            key = Key(f"{name}.<field>", FREE_TYPE, f"as {hint.__metadata__[0]} has it", "The field of this name.")
            below.append(SectionKeys(name, text, (key,)))
        elif typing.get_origin(hint) is dict:
            kind = typing.get_args(hint)[1]
            below += _list_sections(kind, f"{name}.<name>.", text, kind())
        else:
            keys.append(Key(name, describe_type(hint), getattr(defaults, field.name), text))
    name, doc = prefix.rstrip("."), doc or inspect.getdoc(section) or ""
    return [SectionKeys(name, doc, tuple(keys)), *below]


def _read_field_docs(section: type) -> dict[str, str]:
    # Python does not keep the docstrings below the fields of a class and its bases, so the source is parsed.
    docs: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, reversed(section.__mro__)):
        (class_def,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(class_def, ast.ClassDef)
        for statement, following in itertools.pairwise(class_def.body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = inspect.cleandoc(text)
    return docs


def describe_type(hint: Any) -> str:
    """Describe a type: "int > 0", "one of a, b", "list of text"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        description = next((annotation for annotation in args[1:] if isinstance(annotation, str)), None)
        limits = [limit for field in args[1:] if isinstance(field, FieldInfo) for limit in field.metadata]
        bounds = [
            f"{sign} {getattr(limit, bound):g}"
            for limit in limits
            for bound, sign in _BOUNDS.items()
            if hasattr(limit, bound)
        ]
        return description or f"{describe_type(args[0])} {' and '.join(bounds)}".rstrip()
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(map(describe_type, args)))
    if origin in (list, tuple):
        return f"list of {describe_type(args[0])}"
    if origin is dict or hint is dict:
        return "a mapping"
    return {bool: "true or false", str: "text", type(None): "null"}.get(hint) or str(getattr(hint, "__name__", hint))


def load_tables(name: str) -> dict[str, dict[str, str]]:
    """Load a YAML file of this package: tables of texts, by section."""
    text = resources.files("megatron_grpo.config").joinpath(name).read_text(encoding="utf-8")
    # libyaml's loader, where PyYAML has it, is ten times as fast as the one in Python.
    tables: dict[str, dict[str, str]] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables


def build_values(config: Config) -> dict[str, Any]:
    """Build plain values of the sections that a run has."""
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if config.method.has_section(name)}


def list_changes(config: Config, section: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of every non-default leaf of a section."""
    settings = getattr(config, section)
    defaults = dict(flatten(dataclasses.asdict(type(settings)()), f"{section}."))
    for key, value in flatten(dataclasses.asdict(settings), f"{section}."):
        if key not in defaults or value != defaults[key]:  # pass-through fields have no default here
            yield key, value
