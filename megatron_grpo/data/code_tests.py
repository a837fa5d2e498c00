"""The tests of the code environment: the forms of a row's answer, and an analysis of Python tests before they run."""

from __future__ import annotations

import ast
import builtins
import json
import math
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Test = str | tuple[str, str]
"""Python statements, or the input and the output of a program."""


def parse_code_tests(answer: Any) -> list[Test]:
    """The tests that a reference answer of the code environment holds: Python statements, or (input, output).

    Args:
        answer: a text or a list of texts; a list of {"input", "output"}, or {"inputs": [...], "outputs": [...]}; or
            JSON text of a list or an object like these.

    Raises:
        ValueError: the answer has none of these forms.
    """
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        try:
            answer = json.loads(answer)
        except RecursionError as error:  # thousands of brackets
            raise ValueError(f"is not JSON that can be read: {error}") from None
    if isinstance(answer, str):
        answer = [answer] if answer.strip() else []
    if isinstance(answer, dict) and all(isinstance(answer.get(key), list) for key in ("inputs", "outputs")):
        pairs = zip(answer["inputs"], answer["outputs"], strict=True)
        answer = [{"input": given, "output": expected} for given, expected in pairs]
    if isinstance(answer, list):
        if all(isinstance(one, str) for one in answer):
            return list(answer)
        if all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in answer):
            return [(str(one["input"]), str(one["output"])) for one in answer]
    raise ValueError("is neither Python tests nor cases of input and output")


@dataclass(frozen=True, slots=True)
class PythonTest:
    """One text of Python tests."""

    text: str
    """Source, in which `a is b` of two expressions is replaced by `__same__(a, b)`."""
    counted: bool
    """Whether the text is a test; otherwise it only has imports and definitions for other texts."""
    collected: tuple[str, ...]
    """Test functions and classes that the text defines and does not call."""


@dataclass(frozen=True, slots=True)
class PreparedTests:
    """Python tests of a row, prepared to run against a program in another process."""

    tests: tuple[PythonTest, ...]
    names: tuple[str, ...]
    """Names that the tests take from the program."""
    own: dict[str, str]
    """Names that the tests neither import nor take from the program, each with its module[:attribute]."""
    shared: bool
    """Whether all tests run in one fork of the program, because one reads a variable that an earlier one assigned."""
    uses_unittest: bool
    doubts: tuple[str, ...]
    """Reasons, found in the texts, why a program could pass the tests undeservedly, or cannot pass them at all."""

    @property
    def counted(self) -> int:
        """Number of texts that are tests."""
        return sum(one.counted for one in self.tests)


_STANDARD = (
    "math cmath re json collections itertools functools random datetime string statistics decimal fractions heapq "
    "bisect operator typing copy os sys time io unittest numpy pandas"
)
_MODULES = {name: name for name in _STANDARD.split()} | {"np": "numpy", "pd": "pandas"}
"""Names of modules that tests may use without importing them when the program does."""
_MATHEMATICS = {name: f"math:{name}" for name in vars(math) if not name.startswith("_")}
_CHECKING = {"isclose", "isnan", "isinf", "isfinite", "fabs", "pi", "e", "tau", "inf", "nan"}
"""Names of mathematics that tests compare with."""
_EXECUTING = ("eval", "exec", "compile", "__import__")
_ORDERS = ast.Eq | ast.NotEq | ast.Lt | ast.LtE | ast.Gt | ast.GtE
_COMPARED = ("assertEqual", "assertNotEqual", "assertEquals", "assertLess", "assertGreater", "assertCountEqual")


@lru_cache(maxsize=512)
def prepare_tests(texts: tuple[str, ...]) -> PreparedTests:
    """Analyse Python tests: their imports, the names that they take from the program, and doubts about their verdicts.

    Raises:
        ValueError: a text is not Python.
    """
    try:
        trees = [ast.parse(text) for text in texts]
        bound = {name for text in texts for name in _bound(text)}
        free = {name for text in texts for name in _free(text)} - bound - {"__name__", "__file__"}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is not Python: {error}") from None
    own = {name: _MODULES[name] for name in free & _MODULES.keys() if _only_attributes(trees, name)}
    names = free - own.keys() - vars(builtins).keys()
    if len(names) > 1:
        taken = names & (_MATHEMATICS.keys() if names - _MATHEMATICS.keys() else _CHECKING)
        own |= {name: _MATHEMATICS[name] for name in taken}
        names -= taken
    elif not names:
        # A program may define a function under a builtin's name, if nothing else can be meant by the tests.
        called = {name for tree in trees for name in _called(tree)} & free
        names = called if len(called) == 1 else set()
    tests = tuple(_test(tree, names) for tree in trees)
    return PreparedTests(
        tests=tests,
        names=tuple(sorted(names)),
        own=own,
        shared=_shared(trees),
        uses_unittest=any("unittest" in text for text in texts),
        doubts=tuple(dict.fromkeys(doubt for tree in trees for doubt in _doubts(tree, names)))
        or (("use no name of the program, so every program passes them",) if texts and not names else ()),
    )


def _free(text: str) -> set[str]:
    """Names that Python source reads and that no function or class in it makes local."""
    free: set[str] = set()
    tables = [symtable.symtable(text, "tests", "exec")]
    for table in tables:
        tables += table.get_children()
        for one in table.get_symbols():
            # `is_global` is wrong about the names that a function called "top" binds.
            bound = one.is_assigned() or one.is_parameter() or one.is_imported()
            outer = one.is_declared_global() or (one.is_global() and not bound)
            if one.is_referenced() and (table is tables[0] or outer):
                free.add(one.get_name())
    return free


def _bound(text: str, assigned_only: bool = False) -> set[str]:
    """Names that Python source binds at module level: by assignments only, or also by imports and definitions."""
    names = symtable.symtable(text, "tests", "exec").get_symbols()
    if assigned_only:
        return {one.get_name() for one in names if one.is_assigned() and not one.is_namespace()}
    return {one.get_name() for one in names if one.is_assigned() or one.is_imported()}


def _called(tree: ast.AST) -> set[str]:
    return {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def _only_attributes(trees: Sequence[ast.AST], name: str) -> bool:
    """Whether a name is used only for its attributes, as a module is."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in nodes)
    return uses == sum(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name for node in nodes
    )


def _shared(trees: Sequence[ast.Module]) -> bool:
    """Whether a text reads a variable that an earlier one assigned, before it assigns it itself."""
    assigned: set[str] = set()
    for tree in trees:
        seen: set[str] = set()
        for statement in tree.body:
            text = ast.unparse(statement)
            stored = _bound(text)
            simple = isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Assert)
            targets = (
                {statement.target.id}
                if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name)
                else set()
            )
            if (_free(text) | targets) - seen - (set() if simple else stored) & assigned:
                return True
            seen |= stored
        assigned |= _bound(ast.unparse(tree), assigned_only=True)
    return False


class _Identity(ast.NodeTransformer):
    """Replaces `a is b` of two expressions by a call, since Python lets no object answer it."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sides = (node.left, *node.comparators)
        if len(sides) != 2 or any(isinstance(one, ast.Constant) for one in sides):
            return node
        call = ast.Call(ast.Name("__same__", ast.Load()), list(sides), [])
        if isinstance(node.ops[0], ast.Is):
            return call
        return ast.UnaryOp(ast.Not(), call) if isinstance(node.ops[0], ast.IsNot) else node


def _test(tree: ast.Module, names: set[str]) -> PythonTest:
    top = {name for one in tree.body if not isinstance(one, _DEFINITIONS) for name in _free(ast.unparse(one))}
    collected = tuple(one.name for one in tree.body if _is_collected(one) and one.name not in top)  # type: ignore[attr-defined]
    only_defines = all(
        isinstance(one, ast.Import | ast.ImportFrom | _DEFINITIONS)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        or (isinstance(one, ast.Assign | ast.AnnAssign) and not _free(ast.unparse(one)) & names)
        for one in tree.body
    )
    text = ast.unparse(ast.fix_missing_locations(_Identity().visit(tree)))
    return PythonTest(text=text, counted=bool(collected) or not only_defines, collected=collected)


_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _is_collected(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in node.bases)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _doubts(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """Yield reasons why a text's verdict cannot be trusted, or why it cannot work outside the program's process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in names:
                    yield f"inherit: class {node.name} from {base.id}, which the program defines"
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            made = [one for one in sides if _makes(one, names)]
            if made and any(isinstance(one, _ORDERS) for one in node.ops):
                yield f"compare {ast.unparse(made[0])}, whose equality the program defines"
        elif isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called in _EXECUTING and isinstance(node.func, ast.Name) and called not in names:
                yield f"call {called}(), which executes what the program may have written"
            elif called == "open" and isinstance(node.func, ast.Name):
                yield "call open(), though they have no file in common with the program"
            elif called in _COMPARED and any(_makes(one, names) for one in node.args[:2]):
                yield f"compare {ast.unparse(node.args[0])}, whose equality the program defines"


def _makes(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression calls a class of the program, recognised by a name that begins with a capital letter."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in names
        and node.func.id[:1].isupper()
    )
