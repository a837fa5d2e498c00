"""The tests of the code environment: forms of an answer, and an analysis of Python tests."""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
import symtable
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Test = str | tuple[str, str]
"""Python statements, or the input and the output of a program."""

TOLERANCE = 1e-6  # of numbers with decimals in outputs, as in programming contests: absolute, or relative above 1
_SOLUTION = re.compile(r"^class Solution\b", re.MULTILINE)
# JSON has no tuples, and sums in another order have other last digits.
_EQUALITY = f"""
def is_same_value(value, expected):
    value = list(value) if type(value) is tuple else value
    if type(value) is list and type(expected) is list:
        return len(value) == len(expected) and all(map(is_same_value, value, expected))
    if type(expected) is float and type(value) in (int, float):
        return abs(value - expected) <= {TOLERANCE} * max(1.0, abs(expected))
    return value == expected
"""

_STANDARD = (
    "math cmath re json collections itertools functools random datetime string statistics decimal fractions heapq "
    "bisect operator typing copy os sys time io unittest numpy pandas"
)
# Names of modules that tests may use without importing them when the program does.
_MODULES = {name: name for name in _STANDARD.split()} | {"np": "numpy", "pd": "pandas"}
_MATHEMATICS = {name: f"math:{name}" for name in vars(math) if not name.startswith("_")}
# Names of mathematics that tests compare with.
_CHECKING = {"isclose", "isnan", "isinf", "isfinite", "fabs", "pi", "e", "tau", "inf", "nan"}
_EXECUTING = ("eval", "exec", "compile", "__import__")
_COMPARISONS = ast.Eq | ast.NotEq | ast.Lt | ast.LtE | ast.Gt | ast.GtE
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_ASSERTIONS = ("assertEqual", "assertNotEqual", "assertEquals", "assertLess", "assertGreater", "assertCountEqual")


def parse_code_tests(answer: Any, program: str = "") -> list[Test]:
    """Parse the tests of a reference answer.

    An answer is a text or a list of texts; a list of {"input", "output"}, or {"inputs": [...], "outputs": [...]}; or
    JSON text of a list or an object like these. Cases that name a function ("fn_name", or "func_name" in their
    "metadata") become Python tests that call it: as a method where `program` has a class Solution. Else: ValueError.
    """
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        try:
            answer = json.loads(answer)
        except RecursionError as error:  # thousands of brackets
            raise ValueError(f"is not JSON that can be read: {error}") from None
    if isinstance(answer, str):
        answer = [answer] if answer.strip() else []
    if isinstance(answer, dict) and all(isinstance(answer.get(key), list) for key in ("inputs", "outputs")):
        pairs, name = zip(answer["inputs"], answer["outputs"], strict=True), answer.get("fn_name")
        answer = [{"input": text, "output": expected, "fn_name": name} for text, expected in pairs]
    if isinstance(answer, list):
        if all(isinstance(test, str) for test in answer):
            return list(answer)
        if all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in answer):
            return _parse_cases(answer, program)
    raise ValueError("is neither Python tests nor cases of input and output")


def _parse_cases(cases: Sequence[Mapping[str, Any]], program: str) -> list[Test]:
    functions = [_find_function(case) for case in cases]
    if None not in functions:
        owner = "Solution()." if _SOLUTION.search(program) else ""
        names = [f"{owner}{function}" for function in functions]
        return [_EQUALITY, *(_write_call(name, case) for name, case in zip(names, cases, strict=True))]
    if any(functions) or any(case.get("testtype") == "functional" for case in cases):
        raise ValueError("has cases that call a function whose name they lack; name it in each, as fn_name")
    return [(_read_text(case["input"]), _read_text(case["output"])) for case in cases]


def _find_function(case: Mapping[str, Any]) -> str | None:
    """Find the function that a case calls; None: it is of a whole program."""
    metadata = case.get("metadata")
    name = case.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"names a function {name!r}, which is no name")
    return name


def _write_call(name: str, case: Mapping[str, Any]) -> str:
    """Write a case as a Python test.

    An input that is text has one argument in JSON a line.
    """
    arguments, expected = case["input"], case["output"]
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    if not isinstance(arguments, list):
        raise ValueError(f"has an input of {name} that is no list of arguments: {arguments!r}")
    # APPS and its descendants put the expected value into a list of its own.
    values = [expected, *expected] if isinstance(expected, list) and len(expected) == 1 else [expected]
    return f"assert any(is_same_value({name}(*{arguments!r}), expected) for expected in {values!r})"


def _read_text(value: Any) -> str:
    """Read an input or output, which may be a list of its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, list | dict):
        raise ValueError(f"has {value!r} as input or output of a program; give text, or a function's name as fn_name")
    return str(value)


@dataclass(frozen=True, slots=True)
class PythonTest:
    """One text of Python tests."""

    text: str  # source, in which `a is b` of two expressions is replaced by `__same__(a, b)`
    is_test: bool  # False: the text only has imports and definitions for other texts
    test_names: tuple[str, ...]  # test functions and classes that the text defines and does not call


@dataclass(frozen=True, slots=True)
class PreparedTests:
    """A row's Python tests, ready to run in another process."""

    tests: tuple[PythonTest, ...]
    names: tuple[str, ...]  # names that the tests take from the program
    modules: dict[str, str]
    """Names of modules that the tests use without importing them, each with its module[:attribute]."""
    needs_one_fork: bool
    """True: all tests run in one fork of the program, because a test reads a variable of an earlier test."""
    doubts: tuple[str, ...]  # reasons why a program could pass the tests undeservedly, or cannot pass them at all

    @property
    def test_count(self) -> int:
        return sum(test.is_test for test in self.tests)


@lru_cache(maxsize=512)  # the samples of a group share their tests
def prepare_tests(texts: tuple[str, ...]) -> PreparedTests:
    """Analyse tests: imports, the program's names, doubts; ValueError: not Python."""
    try:
        trees = [ast.parse(text) for text in texts]
        bound = {name for text in texts for name in _find_bound_names(text)}
        free = {name for text in texts for name in _find_free_names(text)} - bound - {"__name__", "__file__"}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is not Python: {error}") from None
    modules = {name: _MODULES[name] for name in free & _MODULES.keys() if _uses_only_attributes(trees, name)}
    names = free - modules.keys() - vars(builtins).keys()
    if len(names) > 1:
        mathematics = names & (_MATHEMATICS.keys() if names - _MATHEMATICS.keys() else _CHECKING)
        modules |= {name: _MATHEMATICS[name] for name in mathematics}
        names -= mathematics
    elif not names:
        # A program may define a function under a builtin's name, if the tests can mean nothing else.
        calls = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
        called = {function.id for function in calls if isinstance(function, ast.Name)} & free
        names = called if len(called) == 1 else set()
    tests = tuple(_prepare_test(tree, names) for tree in trees)
    doubts = tuple(dict.fromkeys(doubt for tree in trees for doubt in _find_doubts(tree, names)))
    if texts and not names:
        doubts = doubts or ("use no name of the program, so every program passes them",)
    return PreparedTests(
        tests=tests,
        names=tuple(sorted(names)),
        modules=modules,
        needs_one_fork=_has_shared_variables(trees),
        doubts=doubts,
    )


def _find_free_names(text: str) -> set[str]:
    free: set[str] = set()
    tables = [symtable.symtable(text, "tests", "exec")]
    # The list grows while it is read: every table adds those of the functions and classes within.
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            # `is_global` is wrong about the names that a function called "top" binds.
            is_bound = symbol.is_assigned() or symbol.is_parameter() or symbol.is_imported()
            is_outer = symbol.is_declared_global() or (symbol.is_global() and not is_bound)
            if symbol.is_referenced() and (table is tables[0] or is_outer):
                free.add(symbol.get_name())
    return free


def _find_bound_names(text: str, assigned_only: bool = False) -> set[str]:
    symbols = symtable.symtable(text, "tests", "exec").get_symbols()
    if assigned_only:
        return {symbol.get_name() for symbol in symbols if symbol.is_assigned() and not symbol.is_namespace()}
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _uses_only_attributes(trees: Sequence[ast.AST], name: str) -> bool:
    # A name that is only used for its attributes, as modules are, is no variable or function of the program.
    nodes = [node for tree in trees for node in ast.walk(tree)]
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in nodes)
    return uses == sum(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name for node in nodes
    )


def _has_shared_variables(trees: Sequence[ast.Module]) -> bool:
    assigned: set[str] = set()
    for tree in trees:
        bound: set[str] = set()
        for statement in tree.body:
            text = ast.unparse(statement)
            stored = _find_bound_names(text)
            is_simple = isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Assert)
            read = _find_free_names(text)
            if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                read.add(statement.target.id)
            # A simple statement reads before it binds; a loop or `with` may read the name that it has bound itself.
            if read - bound - (set() if is_simple else stored) & assigned:
                return True
            bound |= stored
        assigned |= _find_bound_names(ast.unparse(tree), assigned_only=True)
    return False


class _Identity(ast.NodeTransformer):
    """Replaces `a is b` by a call, because proxies cannot override `is`."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sides = (node.left, *node.comparators)
        if len(sides) != 2 or any(isinstance(side, ast.Constant) for side in sides):
            return node
        call = ast.Call(ast.Name("__same__", ast.Load()), list(sides), [])
        if isinstance(node.ops[0], ast.Is):
            return call
        return ast.UnaryOp(ast.Not(), call) if isinstance(node.ops[0], ast.IsNot) else node


def _prepare_test(tree: ast.Module, names: set[str]) -> PythonTest:
    statements = [node for node in tree.body if not isinstance(node, _DEFINITIONS)]
    used = {name for statement in statements for name in _find_free_names(ast.unparse(statement))}
    collected = tuple(node.name for node in tree.body if _is_collected(node) and node.name not in used)  # type: ignore[attr-defined]
    only_defines = all(
        isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Assign | ast.AnnAssign) and not _find_free_names(ast.unparse(node)) & names)
        for node in statements
    )
    text = ast.unparse(ast.fix_missing_locations(_Identity().visit(tree)))
    return PythonTest(text=text, is_test=bool(collected) or not only_defines, test_names=collected)


def _is_collected(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in node.bases)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def _find_doubts(tree: ast.AST, names: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id in names:
                    yield f"inherit: class {node.name} from {base.id}, which the program defines"
        elif isinstance(node, ast.Compare):
            instances = [side for side in (node.left, *node.comparators) if _is_class_call(side, names)]
            if instances and any(isinstance(operator, _COMPARISONS) for operator in node.ops):
                yield f"compare {ast.unparse(instances[0])}, whose equality the program defines"
        elif isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called in _EXECUTING and isinstance(node.func, ast.Name) and called not in names:
                yield f"call {called}(), which executes what the program may have written"
            elif called == "open" and isinstance(node.func, ast.Name):
                yield "call open(), though they have no file in common with the program"
            elif called in _ASSERTIONS and any(_is_class_call(argument, names) for argument in node.args[:2]):
                yield f"compare {ast.unparse(node.args[0])}, whose equality the program defines"


def _is_class_call(node: ast.expr, names: set[str]) -> bool:
    # A class of the program can only be told by its name, which begins with a capital letter by custom.
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    return name in names and name[:1].isupper()
