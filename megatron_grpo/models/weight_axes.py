"""Axes of tensors as products and sections, by which the same numbers are found in two layouts.

An axis is a product of factors, from the outermost to the innermost, or several sections one after the other:

    hidden                              one factor
    heads * value_dim                   for each head its values
    gate * ffn | up * ffn               all rows of the gate, then all rows of up
    ffn * (gate | up)                   rows of gate and up by turns
    groups * (query | key | value)      for each key/value head its query heads, its key and its value

Factors are numbers, or sizes of the model (`ModelShape.sizes`). Labels have size 1 and tell equally large sections
apart. Two tensors hold the same section where the names of factors and labels are the same, in whatever order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache

LABELS = frozenset({"gate", "up", "q", "k", "v", "z", "b", "a", "x", "c", "dt", "expert"})
"""Names of size 1. An axis "expert" belongs to a tensor of all experts, of which a parameter has one at a time."""

# Sections of an axis: the number of the first row, and each factor's name, size and rows between neighbours.
Parts = list[tuple[int, tuple[tuple[str, int, int], ...]]]


@cache
def _parse(axis: str) -> ast.expr:
    return ast.parse(axis, mode="eval").body


def split_sections(axis: str) -> list[str]:
    """Split an axis into its sections."""
    tree = _parse(axis)
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        return [*split_sections(ast.unparse(tree.left)), ast.unparse(tree.right)]
    return [axis]


def list_names(axis: str) -> list[str]:
    """List the names in an axis, in their order."""
    return re.findall(r"\w+", axis)


def measure_axis(axis: str, sizes: Mapping[str, int]) -> int:
    return _locate_parts(_parse(axis), sizes)[0]


def locate_sections(axis: str, sizes: Mapping[str, int]) -> Parts:
    return _locate_parts(_parse(axis), sizes)[1]


def _locate_parts(tree: ast.expr, sizes: Mapping[str, int]) -> tuple[int, Parts]:
    """Count an axis's rows, and locate its sections."""
    if isinstance(tree, ast.Constant):
        assert isinstance(tree.value, int), ast.unparse(tree)
        return tree.value, [(0, ((str(tree.value), tree.value, 1),))]
    if isinstance(tree, ast.Name):
        size = 1 if tree.id in LABELS else sizes[tree.id]
        return size, [(0, ((tree.id, size, 1),))]
    assert isinstance(tree, ast.BinOp), ast.unparse(tree)
    (first_rows, first), (rows, second) = (_locate_parts(side, sizes) for side in (tree.left, tree.right))
    if isinstance(tree.op, ast.BitOr):
        return first_rows + rows, first + [(first_rows + row, factors) for row, factors in second]
    return first_rows * rows, [
        (outer * rows + inner, (*((name, size, step * rows) for name, size, step in factors), *inner_factors))
        for outer, factors in first
        for inner, inner_factors in second
    ]
