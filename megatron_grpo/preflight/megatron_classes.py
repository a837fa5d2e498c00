"""The fields of Megatron-Core's configuration classes, read from its source: importing it takes seconds."""

from __future__ import annotations

import ast
import functools
import importlib.util
import typing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from megatron_grpo.preflight.passed_values import refusal

DtypeName = Literal["float32", "bfloat16", "float16"]
"""How a configuration writes a torch.dtype."""
_NAMES: dict[str, Any] = {
    **{name: getattr(typing, name) for name in ("Dict", "List", "Literal", "Optional", "Tuple", "Union")},
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, str, tuple)},
    "torch": SimpleNamespace(dtype=DtypeName),
}
"""What annotations of fields that a configuration can set are made of; functions and classes are not among it."""


@dataclass(frozen=True, slots=True)
class MegatronField:
    """A field of one of Megatron-Core's configuration classes."""

    annotation: str
    """Its type as it is written there."""

    @property
    def kind(self) -> Any:
        """The type, torch.dtype as `DtypeName`, enumerations as the names of their members; None: it is one that no
        YAML value can have, such as a function."""
        names = _NAMES | _enumerations()
        try:
            return eval(self.annotation, {"__builtins__": {}}, names)  # the installed package's own text
        except (NameError, AttributeError):
            return None

    def refuses(self, value: Any) -> str | None:
        """What is wrong with a value, in words; None: it is of the field's type.

        Args:
            value: as YAML gives it (`refusal`).
        """
        kind = self.kind
        if kind is None:
            return f"takes a {self.annotation}, which a configuration cannot hold"
        return refusal(kind, value)


@functools.cache
def _enumerations() -> dict[str, Any]:
    """Megatron-Core's enumerations by name, each as the names of its members."""
    tree = ast.parse((_package() / "transformer" / "enums.py").read_text())
    return {
        node.name: Literal[tuple(one.targets[0].id for one in node.body if isinstance(one, ast.Assign))]  # type: ignore[misc,attr-defined,unused-ignore]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _package() -> Path:
    """The folder of the installed megatron.core.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    found = importlib.util.find_spec("megatron.core")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("megatron.core is not installed", name="megatron.core")
    return Path(found.origin).parent


@functools.cache
def megatron_fields(module: str, name: str) -> dict[str, MegatronField]:
    """The fields of a class and of those it inherits from, by name.

    Args:
        module: where the class is, below megatron.core: "transformer.transformer_config".
        name: of the class.

    Raises:
        ModuleNotFoundError: Megatron-Core is not installed.
    """
    file = _package().joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    fields: dict[str, MegatronField] = {}
    for base in defined[name].bases:
        assert isinstance(base, ast.Name), f"{name} inherits from {ast.unparse(base)}"
        fields |= megatron_fields(module if base.id in defined else _imported_from(tree, base.id), base.id)
    for statement in defined[name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields[statement.target.id] = MegatronField(ast.unparse(statement.annotation))
    return fields


def _imported_from(tree: ast.Module, name: str) -> str:
    """The module below megatron.core that a file imports a class from."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return (node.module or "").removeprefix("megatron.core.")
    raise AssertionError(f"{name} is not imported")
