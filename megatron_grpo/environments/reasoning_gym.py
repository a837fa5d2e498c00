"""Scores of reasoning_gym: each task judges its answers."""

from __future__ import annotations

import ast
import inspect
import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.data.gym_rows import ENTRY, GymEntry, GymError, create_dataset, import_library
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment

ANSWER_TIMEOUT_S = 5.0  # an answer whose scoring takes longer is wrong
_BEGIN, _END = "<answer>", "</answer>"
_EVALUATORS = {"eval", "exec", "parse_expr", "sympify"}
# Of answers that a library evaluates as Python: only literals and small formulas pass.
_MOST_CHARACTERS = 1000
_MOST_DIGITS = 30  # of a number in a formula
_LARGEST_EXPONENT = 100
_MOST_NESTED_POWERS = 2
_FUNCTIONS = {"sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh"}
# Text that is no Python cannot be evaluated as it stands. sympy rewrites some such text first ("3!"), but nothing that
# has only these characters.
_INERT = re.compile(r"[A-Za-z0-9 ,;:\n\[\]|_#-]*")
_VARIABLE = re.compile(r"[A-Za-z]\d*")


class ReasoningGymEnvironment(Environment):
    """Reward from 0 to 1 by the task's scorer; correct at 1.

    The answer is the text between the last <answer> and </answer>, or the whole response without them. Some scorers
    evaluate answers as Python; their tasks accept only literals and small formulas.
    """

    needs_columns = (ENTRY,)

    def __init__(self) -> None:
        try:
            import_library()
        except GymError as error:
            raise RunError(str(error)) from error
        self._datasets: dict[tuple[str, str], Any] = {}

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        rewards = [self._score_answer(request.extra_env_info[ENTRY], request.response) for request in requests]
        return [EnvironmentReturn(reward=reward, correct=reward >= 1) for reward in rewards]

    def _score_answer(self, entry: GymEntry, response: str) -> float:
        answer = find_tagged_answer(response).strip()
        if is_evaluating(entry.task) and not is_plain(answer):
            return 0.0
        key = entry.task, repr(sorted(entry.options.items()))
        if key not in self._datasets:
            self._datasets[key] = create_dataset(entry.task, entry.options)
        try:
            with limit_time(ANSWER_TIMEOUT_S):
                return float(self._datasets[key].score_answer(answer, dict(entry.item)))
        except Exception:  # noqa: BLE001 - scorers raise anything about answers that they do not expect
            return 0.0


@cache
def is_evaluating(task: str) -> bool:
    """True if the task's scorer may evaluate an answer as Python."""
    dataset, _ = import_library().factory.DATASETS[task]
    module: Any = inspect.getmodule(dataset)
    calls = (node.func for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call))
    names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
    # A function of the task itself may have the name of sympy's.
    return any(getattr(vars(module).get(name), "__module__", "") != module.__name__ for name in names & _EVALUATORS)


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after `seconds`; main thread only."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def find_tagged_answer(response: str) -> str:
    """Find the text between the last <answer> and </answer>; else the response."""
    # In linear time, also for many tags without an end.
    answer, position = response, 0
    while (begin := response.find(_BEGIN, position)) >= 0:
        position = response.find(_END, begin)
        if position < 0:
            break
        answer = response[begin + len(_BEGIN) : position]
    return answer


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
