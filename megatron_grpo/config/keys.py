"""Every key of the schema with its type, default and docstring, read once for messages, help and the reference page."""

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from operator import attrgetter
from typing import Any, Literal

import yaml
from pydantic.fields import FieldInfo

from megatron_grpo.config.loop_schema import LOOPS, SHARED, is_shared, translate_key
from megatron_grpo.config.schema import MISSING, Config, LoopConfig, PPOConfig
from megatron_grpo.config.section import EnvironmentOptions, MegatronFields, TemplateArguments, VllmArguments

FREE_TYPE = "true or false, number, text, list or mapping"
"""Type of pass-through fields, which Megatron-Core, vLLM or an environment checks."""
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the configuration."""

    name: str
    """Dotted name; a part in angle brackets stands for a name that the user chooses. A key that GRPO and PPO share has
    GRPO's name."""
    type: str
    """Type in words: "int > 0", "one of linear, cosine", "text or null"."""
    default: Any
    doc: str

    @property
    def default_text(self) -> str:
        """The default as it is written in YAML, and PPO's default if it differs; "required" for a key without one."""
        if self.default == MISSING:
            return "required"
        text = _written(self.default)
        if not is_shared(self.name):
            return text
        others = _written(functools.reduce(getattr, self.name.split(".")[1:], PPOConfig()))
        return text if others == text else f"{text}, with ppo {others}"


@dataclass(frozen=True, slots=True)
class SectionKeys:
    """One section of the configuration."""

    name: str
    """Dotted name; empty for the top level. A section that GRPO and PPO share has GRPO's name."""
    doc: str
    keys: tuple[Key, ...]
    """Keys of the section itself, without those of the sections below it."""
    shared: bool = False
    """Whether GRPO and PPO share the section."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the section: one for each algorithm if they share it, else one."""
        section = self.name.partition(".")[0]
        return tuple(loop + self.name.removeprefix(section) for loop in LOOPS) if self.shared else (self.name,)


@functools.cache
def read_sections() -> tuple[SectionKeys, ...]:
    """All sections, in the order of the schema."""
    return tuple(_walk(Config, "", "", Config()))


@functools.cache
def read_keys() -> dict[str, Key]:
    """All leaves by name, in the order of the schema."""
    return {key.name: key for group in read_sections() for key in group.keys}


def find_key(name: str) -> str | None:
    """The schema's name of a leaf ("env.math.type" -> "env.<name>.type"); None when there is no such leaf."""
    name = translate_key("grpo", name)
    return (
        name if name in read_keys() else next((key for key in read_keys() if "<" in key and is_match(key, name)), None)
    )


def is_section(name: str) -> bool:
    """Whether a dotted name is a group of keys."""
    known = [one for group in read_sections() for one in group.names]
    by_name = [one.removesuffix(".<name>") for one in known if one.endswith(".<name>")]
    return bool(name) and any(is_match(one, name) for one in (*known, *by_name))


def list_members(section: str) -> list[str]:
    """The keys of a section, and the names of sections in it."""
    found = []
    for group in read_sections():
        if any(is_match(name, section) for name in group.names):
            found += [key.name.rpartition(".")[2] for key in group.keys]
        elif any(is_match(name.rpartition(".")[0], section) for name in group.names):
            found.append(group.name.rpartition(".")[2])
    return found


def is_match(pattern: str, name: str) -> bool:
    """Whether a dotted name matches a name of the schema: "env.math" matches "env.<name>"."""
    expected, parts = pattern.split("."), name.split(".")
    return len(expected) == len(parts) and all(
        e == p or e.startswith("<") for e, p in zip(expected, parts, strict=True)
    )


def _walk(section: type, prefix: str, doc: str, defaults: Any) -> list[SectionKeys]:
    """The groups of a section, whose keys begin with `prefix`; `doc`, unless empty, replaces its class's docstring.

    Keys that both algorithms share are listed once, before the keys that only GRPO has.
    """
    docs = _field_docs(section)
    hints = typing.get_type_hints(section, include_extras=True)
    own: list[Key] = []
    below: list[SectionKeys] = []
    listed_before = SHARED if issubclass(section, LoopConfig) and section is not LoopConfig else ()
    for field in dataclasses.fields(section):
        hint, name, text = hints[field.name], f"{prefix}{field.name}", docs.get(field.name, "")
        if field.name in listed_before:
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if name == LOOPS[0]:
                below += _walk(LoopConfig, f"{name}.", "", getattr(defaults, name))
            below += _walk(hint, f"{name}.", text, getattr(defaults, field.name))
        elif hint in (EnvironmentOptions, MegatronFields, TemplateArguments, VllmArguments):
            key = Key(f"{name}.<field>", FREE_TYPE, f"as {hint.__metadata__[0]} has it", "The field of this name.")
            below.append(SectionKeys(name, text, (key,)))
        elif typing.get_origin(hint) is dict:
            kind = typing.get_args(hint)[1]
            below += _walk(kind, f"{name}.<name>.", text, kind())
        else:
            own.append(Key(name, describe_type(hint), getattr(defaults, field.name), text))
    name, doc = prefix.rstrip("."), doc or inspect.getdoc(section) or ""
    return [SectionKeys(name, doc, tuple(own), shared=section is LoopConfig or is_shared(name)), *below]


def _field_docs(section: type) -> dict[str, str]:
    """Docstrings below the fields of a class and of its bases, by field; Python itself does not keep them."""
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
    """A type in words: "int > 0", "true or false", "one of fp32, fp64 or null", "list of text"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        written = next((one for one in args[1:] if isinstance(one, str)), None)
        limits = [limit for info in args[1:] if isinstance(info, FieldInfo) for limit in info.metadata]
        bounds = [f"{sign} {getattr(one, b):g}" for one in limits for b, sign in _BOUNDS.items() if hasattr(one, b)]
        return written or f"{describe_type(args[0])} {' and '.join(bounds)}".rstrip()
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(map(describe_type, args)))
    if origin in (list, tuple):
        return f"list of {describe_type(args[0])}"
    if origin is dict or hint is dict:
        return "a mapping"
    return {bool: "true or false", str: "text", type(None): "null"}.get(hint) or str(getattr(hint, "__name__", hint))


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def load_tables(name: str) -> dict[str, dict[str, str]]:
    """A YAML file of this package: tables of names, by section."""
    text = resources.files("megatron_grpo.config").joinpath(name).read_text(encoding="utf-8")
    # libyaml's loader, where PyYAML has it, is ten times as fast as the one in Python.
    tables: dict[str, dict[str, str]] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tables


def list_changes(config: Config, section: str) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf of a section that differs from its default."""
    defaults = dict(flatten(dataclasses.asdict(getattr(Config(), section)), f"{section}."))
    for key, value in flatten(dataclasses.asdict(getattr(config, section)), f"{section}."):
        if key not in defaults or value != defaults[key]:  # pass-through fields have no default here
            yield key, value


def fill_placeholders(config: Config, text: str) -> str:
    """A text with the keys of the algorithm that runs in place of LOOP and PASSES."""
    return text.replace("LOOP.", f"{config.algorithm}.").replace("PASSES", config.passes_key)


def is_met(config: Config, switch: str) -> bool:
    """Whether a setting holds: KEY=VALUE, "KEY above NUMBER", or KEY for one that is not null or empty."""
    key, _, wanted = switch.partition("=")
    key, _, bound = key.partition(" above ")
    value = attrgetter(key)(config)
    if wanted:
        return str(value).lower() == wanted
    return bool(value > float(bound)) if bound else value not in (None, [], {})


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
