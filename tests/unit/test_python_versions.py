"""Constructs that mean something else, or are gone, in another Python that is supported are not used."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    file for folder in ("megatron_grpo", "kernels", "benchmarks") for file in sorted((ROOT / folder).rglob("*.py"))
]
DIFFERENT = {
    "runtime_checkable": "isinstance() of such a protocol finds no parameter of a torch module since 3.12",
    "getattr_static": "finds no parameter of a torch module",
    "pkg_resources": "comes with setuptools, which new environments lack",
    "distutils": "is gone",
    "imp": "is gone",
    "utcnow": "is deprecated since 3.12",
    "utcfromtimestamp": "is deprecated since 3.12",
    "locals": "returns a copy inside of functions since 3.13",
    "Num": "ast.Constant stands for it since 3.8; gone in 3.14",
    "Str": "ast.Constant stands for it since 3.8; gone in 3.14",
    "NameConstant": "ast.Constant stands for it since 3.8; gone in 3.14",
}
"""Names that the package does not use, and why."""


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that a file reads or imports, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in [*modules, *(alias.name for alias in node.names)]:
                yield from ((node.lineno, part) for part in name.split("."))


def test_nothing_depends_on_the_version() -> None:
    assert len(FILES) > 200
    uses = [
        f"{file.relative_to(ROOT)}:{line}: {name} {DIFFERENT[name]}"
        for file in FILES
        for line, name in names_in(ast.parse(file.read_text()))
        if name in DIFFERENT
    ]
    assert not uses


@pytest.mark.parametrize(
    "text",
    ["from typing import runtime_checkable", "import typing\n@typing.runtime_checkable\nclass A: ...", "locals()"],
)
def test_such_names_are_found(text: str) -> None:
    """Guards the test above."""
    assert any(name in DIFFERENT for _, name in names_in(ast.parse(text)))
