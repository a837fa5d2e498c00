"""The arguments of the installed vLLM's engine, read from its source: importing it takes ten seconds."""

from __future__ import annotations

import ast
import collections.abc
import functools
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from megatron_grpo.preflight.passed_values import Unwritable

_ARGUMENTS = "vllm.engine.arg_utils"
_NAMES: dict[str, Any] = {
    **{name: getattr(typing, name) for name in ("Annotated", "Any", "Literal", "Optional", "Union")},
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, object, str, tuple, type)},
    "None": None,
    "Callable": collections.abc.Callable,
    "set": list,  # YAML has no sets
    "torch": SimpleNamespace(dtype=Unwritable),
}


def vllm_arguments() -> dict[str, Any]:
    """The types of the arguments of vLLM's engine, by name. A class of settings is a dict.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    return dict(_argument_types())


def settings_of(argument: str) -> frozenset[str] | None:
    """The names that the mapping of an argument may have; None: it takes none, or one of any names."""
    module = _module(_ARGUMENTS)
    (annotation,) = (one for name, one in _annotations(module, "AsyncEngineArgs") if name == argument)
    named = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    known = (module.found(name) for name in sorted(named - _NAMES.keys()))
    fields = [_fields(*place) for place in known if place is not None and _is_class(*place)]
    return frozenset().union(*fields) if fields else None


@functools.cache
def _argument_types() -> dict[str, Any]:
    module = _module(_ARGUMENTS)
    found = _annotations(module, "AsyncEngineArgs")
    return {name: _evaluated(annotation, module) for name, annotation in found if not name.startswith("_")}


class _Module:
    """A source file of vLLM: what it defines, and where what it imports comes from."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tree = ast.parse(_file(name).read_text())
        self.defined = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.aliases = dict(_aliases(self.tree))
        self.imported = {
            alias.asname or alias.name: (self._absolute(node), alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def found(self, name: str) -> tuple[_Module, str] | None:
        """The module of vLLM that defines what this one calls `name`, and its name there; None: none does."""
        if name in self.defined or name in self.aliases:
            return self, name
        place = self.imported.get(name)
        if place is None or not place[0].startswith("vllm."):
            return None
        return _module(place[0]).found(place[1])

    def _absolute(self, node: ast.ImportFrom) -> str:
        package = self.name if _file(self.name).name == "__init__.py" else self.name.rpartition(".")[0]
        above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
        return ".".join(filter(None, [above, node.module])) if node.level else node.module or ""


@functools.cache
def _module(name: str) -> _Module:
    return _Module(name)


def _file(module: str) -> Path:
    """The source of a module.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("vllm is not installed", name="vllm")
    path = Path(found.origin).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _aliases(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names that stand for a type: `X = Literal[...]`, `X: TypeAlias = ...`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _annotations(module: _Module, name: str) -> Iterator[tuple[str, ast.expr]]:
    """Fields of a class and of those it inherits from in the same file, with their annotations."""
    for base in module.defined[name].bases:
        if isinstance(base, ast.Name) and base.id in module.defined:
            yield from _annotations(module, base.id)
    for node in module.defined[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.annotation


def _fields(module: _Module, name: str) -> frozenset[str]:
    return frozenset(field for field, _ in _annotations(module, name) if not field.startswith("_"))


def _is_class(module: _Module, name: str) -> bool:
    """Whether a name is a class of settings: one that has fields, and is no enumeration."""
    return name in module.defined and not _members(module.defined[name]) and bool(_fields(module, name))


def _members(node: ast.ClassDef) -> list[str]:
    """The names of an enumeration's members; empty: it is none."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    if not bases & {"Enum", "IntEnum", "StrEnum"}:
        return []
    return [
        one.targets[0].id for one in node.body if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    ]


class _Names(Mapping[str, Any]):
    """The types that names stand for in a module; what YAML cannot have is `Unwritable`."""

    def __init__(self, module: _Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        if name in _NAMES:
            return _NAMES[name]
        place = self._module.found(name)
        if place is None:
            return Unwritable
        module, known = place
        if known in module.aliases:
            return _evaluated(module.aliases[known], module)
        members = _members(module.defined[known])
        if members:
            return Literal[tuple(members)]  # type: ignore[misc,unused-ignore]
        return dict[str, Any] if _fields(module, known) else Unwritable

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


def _evaluated(annotation: ast.expr, module: _Module) -> Any:
    """The type that an annotation means; `Unwritable`: one that no YAML value has."""
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    try:
        return eval(str(text), {"__builtins__": {}}, _Names(module))  # the installed package's own text
    except (NameError, AttributeError, TypeError):
        return Unwritable
