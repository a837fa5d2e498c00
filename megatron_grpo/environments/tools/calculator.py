"""Arithmetic for the model: exact, and without running anything that it wrote."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

_LONGEST = 400
"""Characters of an expression."""
_LARGEST_BITS = 4096
"""Bits of a number on the way."""
_DIGITS = 12
"""Significant digits of a result that is no whole number."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ** and brackets, as text: "7", "0.333333333333".

    Raises:
        ValueError: it is no such expression, has no value, or its value is too large.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression may have {_LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    try:
        value = _value(tree.body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.{_DIGITS}g}"
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("too large") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and brackets")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("only whole exponents")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent.numerator) > _LARGEST_BITS:
        raise ValueError("too large")
    return base**exponent.numerator


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _LARGEST_BITS:
        raise ValueError("too large")
    return value
