"""Compares our uses of other libraries with what is installed: names, the arguments of calls, overridden methods.

Uses are found in the syntax trees of our sources, so a new call is covered as soon as it is written. An expression is
followed from imports, annotations and the types that functions declare to return; a call of an object whose class
cannot be told that way is not checked here (the null device runs most of these).
"""

import ast
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIBRARIES = ("megatron", "transformer_engine", "transformer_engine_torch", "vllm", "modelopt")
"""Packages whose calls are checked."""
NCCL = "ProcessGroupNCCL"
"""Class of torch whose calls are checked as well; the rest of torch is public and changes with notice."""


@dataclass(frozen=True)
class Known:
    """An expression that stands for a module, a class or a function."""

    thing: Any
    is_method: bool = False
    """Whether it is a function that gets its object as first argument."""


@dataclass(frozen=True)
class Instance:
    """An expression that stands for an object of a class."""

    kind: Any
    """The class, or `super` of it: something that has the object's methods."""


Meaning = Known | Instance | None


@dataclass
class Findings:
    """The result of reading some sources."""

    checked: int = 0
    """Number of calls that were compared with a signature."""
    problems: list[str] = field(default_factory=list)


def check_module(name: str, findings: Findings) -> None:
    """Import a module of ours and check its calls, the names it reads, and the methods that it overrides."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    check_source(Path(module.__file__).read_text(), module, findings)
    for kind in vars(module).values():
        if inspect.isclass(kind) and kind.__module__ == name:
            findings.problems += override_problems(kind)


def check_source(text: str, module: types.ModuleType, findings: Findings) -> None:
    """Check a source text, whose names are those of `module`."""
    tree = ast.parse(text)
    reader = _Reader(module, findings)
    reader.visit(tree)


def override_problems(kind: type) -> Iterator[str]:
    """Methods of a class of ours that cannot be called as the library's method that they override."""
    for name, member in vars(kind).items():
        base = next((parent for parent in kind.__mro__[1:] if name in vars(parent)), None)
        theirs = None if base is None else vars(base)[name]
        if base is None or not inspect.isfunction(theirs) or not inspect.isfunction(member) or not _is_foreign(base):
            continue
        if name != "__init__" and (reason := _why_incompatible(member, theirs)):
            yield f"{kind.__module__}.{kind.__qualname__}.{name} overrides {base.__qualname__}.{name}: {reason}"


def _why_incompatible(ours: Callable[..., Any], theirs: Callable[..., Any]) -> str | None:
    """Why our function cannot be called as the library's: with what that needs, or by name with all of it.

    None: it can.
    """
    parameters = list(inspect.signature(theirs).parameters.values())
    named = [p for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in named if p.default is p.empty]
    by_position = [None for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
    signature = inspect.signature(ours)
    try:
        signature.bind(None, *by_position, **{p.name: None for p in needed if p.kind is p.KEYWORD_ONLY})
        signature.bind(None, **{p.name: None for p in named})
    except TypeError as error:
        return str(error)
    return None


class _Reader(ast.NodeVisitor):
    """Visits the tree of one source; scopes are dictionaries from names to meanings, the innermost last."""

    def __init__(self, module: types.ModuleType, findings: Findings) -> None:
        self._module, self._findings = module, findings
        self._scopes: list[dict[str, Meaning]] = [{}]
        self._classes: list[type] = []
        self._attributes: list[dict[str, Meaning]] = []
        """Annotated attributes of `self`, by class."""

    # Scopes

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.asname and _of_library(alias.name):
                self._scopes[-1][alias.asname] = Known(importlib.import_module(alias.name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not _of_library(node.module or "") and not any(alias.name == NCCL for alias in node.names):
            return
        module = importlib.import_module(node.module or "")
        for alias in node.names:
            self._scopes[-1][alias.asname or alias.name] = self._member(module, alias.name, node)

    def _member(self, module: types.ModuleType, name: str, node: ast.AST) -> Meaning:
        if not hasattr(module, name):
            try:
                return Known(importlib.import_module(f"{module.__name__}.{name}"))
            except ModuleNotFoundError:
                self._tell(node, f"{module.__name__} has no {name}")
                return None
        return Known(getattr(module, name))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        kind = getattr(self._module, node.name, None)
        if not inspect.isclass(kind) or self._classes:
            self.generic_visit(node)
            return
        self._classes.append(kind)
        self._attributes.append(dict(self._annotated(node)))
        self.generic_visit(node)
        self._classes.pop()
        self._attributes.pop()

    def _annotated(self, node: ast.ClassDef) -> Iterator[tuple[str, Meaning]]:
        """Attributes that the class annotates in its body, or on `self` in a method."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.AnnAssign):
                target = inner.target
                if isinstance(target, ast.Name):
                    yield target.id, self._declared(inner.annotation)
                elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    yield target.attr, self._declared(inner.annotation)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        scope: dict[str, Meaning] = {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            scope[argument.arg] = None if argument.annotation is None else self._declared(argument.annotation)
        is_method = len(self._scopes) == 1 and self._classes
        if is_method and arguments and arguments[0].arg == "self":
            scope["self"] = Instance(self._classes[-1])
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - a name of ast's

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._scopes[-1][target.id] = self._meaning(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self._scopes[-1][node.target.id] = self._declared(node.annotation)

    # Checks

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        callee = self._meaning(node.func)
        if not isinstance(callee, Known) or not callable(callee.thing) or not _is_foreign(callee.thing):
            return
        try:
            signatures = list(_signatures(callee.thing))
        except ValueError:  # a function of C without a description
            return
        self._findings.checked += 1
        passed = [None] * callee.is_method + [None for argument in node.args if not isinstance(argument, ast.Starred)]
        names = {argument.arg: None for argument in node.keywords if argument.arg is not None}
        unpacked = [isinstance(argument, ast.Starred) for argument in node.args] + [
            argument.arg is None for argument in node.keywords
        ]
        reasons = [_why_unbound(signature, passed, names, is_open=any(unpacked)) for signature in signatures]
        if all(reasons):
            self._tell(node, f"{ast.unparse(node.func)}: {'; or '.join(str(argument) for argument in reasons)}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owner = self._meaning(node.value)
        if not isinstance(owner, Known) or not _is_foreign(owner.thing) or isinstance(node.ctx, ast.Store):
            return
        if inspect.ismodule(owner.thing) and not hasattr(owner.thing, node.attr):
            self._tell(node, f"{owner.thing.__name__} has no {node.attr}")
        elif inspect.isclass(owner.thing) and not _class_has(owner.thing, node.attr):
            self._tell(node, f"{owner.thing.__qualname__} has no {node.attr}")

    def _tell(self, node: Any, text: str) -> None:
        self._findings.problems.append(f"{self._module.__name__}:{node.lineno}: {text}")

    # Meanings

    def _meaning(self, node: ast.AST) -> Meaning:
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Await):
            return self._meaning(node.value)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._meaning(node.value), node)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and self._classes:
                return Instance(super(self._classes[-1], self._classes[-1]))
            return _return_kind(self._meaning(node.func))
        return None

    def _named(self, name: str) -> Meaning:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return Known(getattr(self._module, name)) if hasattr(self._module, name) else None

    def _attribute(self, owner: Meaning, node: ast.Attribute) -> Meaning:
        if isinstance(owner, Known):
            attribute = getattr(owner.thing, node.attr, None)
            return None if attribute is None else Known(attribute)
        if owner is None:
            return None
        of_self = isinstance(node.value, ast.Name) and node.value.id == "self" and self._attributes
        if of_self and self._attributes[-1].get(node.attr):
            return self._attributes[-1][node.attr]
        member = getattr(owner.kind, node.attr, None)
        if inspect.isfunction(member):
            static = isinstance(inspect.getattr_static(owner.kind, node.attr, None), staticmethod)
            return Known(member, is_method=not static)
        if isinstance(member, property):
            return None if member.fget is None else _return_kind(Known(member.fget))
        return None if member is None else Known(member)

    def _declared(self, annotation: ast.AST) -> Meaning:
        """What an annotation says about a name: an object of a class, or nothing."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self._declared(ast.parse(annotation.value, mode="eval").body)
        if isinstance(annotation, ast.BinOp):
            return self._declared(annotation.left) or self._declared(annotation.right)
        meaning = self._meaning(annotation)
        return Instance(meaning.thing) if isinstance(meaning, Known) and inspect.isclass(meaning.thing) else None


def _return_kind(callee: Meaning) -> Meaning:
    """What a call returns, as far as it is declared."""
    if not isinstance(callee, Known):
        return None
    if inspect.isclass(callee.thing):
        return Instance(callee.thing)
    try:
        hint = typing.get_type_hints(callee.thing).get("return")
    except (NameError, TypeError, AttributeError):  # the library's annotation cannot be read here
        return None
    if typing.get_origin(hint) not in (None, types.UnionType, typing.Union):
        return None
    kinds = [
        member for member in (typing.get_args(hint) or (hint,)) if inspect.isclass(member) and member is not type(None)
    ]
    return Instance(kinds[0]) if len(kinds) == 1 else None


def _of_library(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES


def _is_foreign(thing: Any) -> bool:
    """Whether a module, class or function belongs to a library whose uses are checked."""
    module = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None) or ""
    return _of_library(module) or NCCL in getattr(thing, "__qualname__", "")


def _class_has(kind: type, name: str) -> bool:
    """Whether a class has an attribute, or its objects do by annotation."""
    return hasattr(kind, name) or any(name in getattr(parent, "__annotations__", {}) for parent in kind.__mro__)


def _signatures(thing: Any) -> Iterator[inspect.Signature]:
    """The signature of a callable, or the signatures that pybind11 writes into its description.

    Raises:
        ValueError: there is neither.
    """
    kind_name = type(thing).__name__
    if kind_name not in ("builtin_function_or_method", "instancemethod", "pybind11_type"):
        yield inspect.signature(thing)
        return
    text = (thing.__init__ if inspect.isclass(thing) else thing).__doc__ or ""
    name = "__init__" if inspect.isclass(thing) else thing.__name__
    signatures = re.findall(rf"^(?:\d+\. )?{name}\((.*)\) -> ", text, re.MULTILINE)
    if not signatures:
        raise ValueError(f"{thing} does not describe its arguments")
    for arguments in signatures:
        # Names of C++ and printed objects stand where Python's grammar has none.
        readable = re.sub(r"<[^<>]*>", "None", arguments.replace("::", "."))
        declared = ast.parse(f"def described({readable}): pass").body[0]
        assert isinstance(declared, ast.FunctionDef)
        names = [argument.arg for argument in declared.args.args]
        needed = len(names) - len(declared.args.defaults)
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        of_object = int(inspect.isclass(thing))
        yield inspect.Signature(
            [
                inspect.Parameter(argument, kind, default=empty if number < needed else None)
                for number, argument in enumerate(names)
                if number >= of_object
            ]
        )


def _why_unbound(
    signature: inspect.Signature, base_overrides: Sequence[None], names: dict[str, None], *, is_open: bool
) -> str | None:
    """Why arguments do not fit a signature; None: they do. `is_open`: more arguments may come from * or **."""
    try:
        (signature.bind_partial if is_open else signature.bind)(*base_overrides, **names)
    except TypeError as error:
        return str(error)
    return None
