"""Check of answers that a library evaluates as Python: only literals and small formulas pass."""

from __future__ import annotations

import ast
import json
import re

_MOST_CHARACTERS = 1000
_MOST_DIGITS = 30  # of a number in a formula
_LARGEST_EXPONENT = 100
_MOST_NESTED_POWERS = 2
_FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
# Text that is no Python cannot be evaluated as it stands. sympy rewrites some such text first ("3!"), but nothing that
# has only these characters.
_INERT = re.compile(r"[A-Za-z0-9 ,;:\n\[\]|_#-]*")
_VARIABLE = re.compile(r"[A-Za-z]\d*")


def is_plain(answer: str) -> bool:
    """True for an answer that is harmless when it is evaluated.

    It is a literal of Python or JSON, a word of capital letters, a formula of numbers, variables, + - * / ** and
    functions such as sin, or text that is no Python. Powers are bounded: a tower of them takes all time and memory.
    """
    if len(answer) > _MOST_CHARACTERS or not answer.isascii():
        return False
    try:
        node = ast.parse(answer, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _INERT.fullmatch(answer) is not None
    return _is_literal(node, answer) or (_is_formula(node) and _count_nested_powers(node) <= _MOST_NESTED_POWERS)


def _is_literal(node: ast.expr, answer: str) -> bool:
    if isinstance(node, ast.Name):
        return answer.isupper()  # a word of the task; variables of scorers have small letters
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return _is_json(answer)
    return True


def _is_json(answer: str) -> bool:
    try:
        json.loads(answer)
    except (ValueError, RecursionError):
        return False
    return True


def _is_formula(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=int() | float() as value):
            return len(str(value)) <= _MOST_DIGITS
        case ast.Name(id=name):
            return _VARIABLE.fullmatch(name) is not None
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _is_formula(operand)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _FUNCTIONS and all(map(_is_formula, arguments))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return _is_formula(left) and _is_formula(right)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _is_formula(left) and _is_exponent(right)
    return False


def _is_exponent(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value <= _LARGEST_EXPONENT
        case ast.Name():
            return _is_formula(node)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _is_exponent(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int())):
            return _is_exponent(left)
        case ast.BinOp(left=ast.Constant() as left, op=ast.Mult(), right=ast.Name() as right):
            return _is_exponent(left) and _is_exponent(right)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return _is_exponent(left) and _is_exponent(right)
    return False


def _count_nested_powers(node: ast.AST) -> int:
    is_power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
    return is_power + max(map(_count_nested_powers, ast.iter_child_nodes(node)), default=0)
