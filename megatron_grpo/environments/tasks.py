"""Environments that need nothing but the response: exact sums, a pattern, mathematical answers, and a game of turns."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any

from pydantic import AfterValidator

from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, Turn
from megatron_grpo.data.specs import countdown_game
from megatron_grpo.environments.interface import Environment
from megatron_grpo.environments.math_answers import Verifier


class AdditionEnvironment(Environment):
    """Compares texts: "095" is right for the answer "095"; "95", " 095" and "0950" are not."""

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        matches = [request.response == request.extra_env_info[REFERENCE] for request in requests]
        return [EnvironmentReturn(reward=float(match), correct=match) for match in matches]


def _expression(pattern: str) -> str:
    """Return the pattern; ValueError: it is not a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return pattern


@dataclass(eq=False)
class FormatEnvironment(Environment):
    """Reward 1 for a response that matches a regular expression, else 0."""

    pattern: Annotated[str, AfterValidator(_expression)]
    """Regular expression in Python's syntax; with "(?s)" at its beginning, "." also matches line ends."""
    whole: bool = True
    """Whether the whole response must match; else a part of it is enough."""

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        match = re.fullmatch if self.whole else re.search
        found = [match(self.pattern, request.response) is not None for request in requests]
        return [EnvironmentReturn(reward=float(one), correct=one) for one in found]


class MathEnvironment(Environment):
    """Reward 1 when the response's final answer equals the reference in value ("1/2", "0.5", "\\\\frac12"), else 0.

    The final answer is the content of the last box, or else the last expression that math-verify finds.
    """

    def __init__(self) -> None:
        self._verifier = Verifier()

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        right = self._verifier.verify([(one.response, str(one.extra_env_info[REFERENCE])) for one in requests])
        return [EnvironmentReturn(reward=float(one), correct=one) for one in right]


_ANSWER = "<answer>"
_LONGEST_EXPRESSION = 400
"""Most characters of a solution."""
_MOVE = re.compile(r"\s*([0-9]{1,9})\s*([-+*/])\s*([0-9]{1,9})\s*")


@dataclass(frozen=True, slots=True)
class Board:
    """State of a game."""

    numbers: tuple[int, ...]
    """Numbers that are left, in the order in which they are shown."""
    target: int
    won: bool = False


@dataclass(eq=False)
class CountdownEnvironment(Environment):
    """Reward 1 when the model makes the row's `target` from the row's `numbers` (or `nums`), else 0.

    Every turn is one move, "a+b", "a-b", "a*b" or "a/b", with two of the remaining numbers. The result, a whole number
    of at least 0, replaces them, and the environment lists the remaining numbers. The game ends with an invalid move or
    when one number is left. A turn may also be a whole solution, as prompts of the public set ask for it: an expression
    of all remaining numbers between <answer> and </answer>, the last ones in the turn.
    """

    multi_turn = True
    board: str = "{result}. Left: {numbers}. Your move:"
    """The environment's text after a move; {result} and {numbers} are filled in."""
    separator: str = " "
    """Text between the numbers."""

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Board:
        """Return the board of the row's columns `numbers` (or `nums`) and `target`."""
        numbers, target = countdown_game(extra_env_info)
        return Board(tuple(numbers), target)

    def step(self, state: Board, response: str) -> Turn:
        if _ANSWER in response:
            expression = response.rpartition(_ANSWER)[2].partition("</answer>")[0]
            return Turn(state=replace(state, won=is_solution(expression, state.numbers, state.target)))
        result = play_move(state.numbers, response)
        if result is None:
            return Turn(state=state)
        numbers, made = result
        state = Board(numbers, state.target, won=made == state.target)
        if state.won or len(numbers) == 1:
            return Turn(state=state)
        text = self.board.replace("{numbers}", self.separator.join(map(str, numbers)))
        return Turn(done=False, state=state, text=text.replace("{result}", str(made)))

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return [EnvironmentReturn(reward=float(one.state.won), correct=one.state.won) for one in requests]


_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-"})
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def is_solution(expression: str, numbers: Sequence[int], target: int) -> bool:
    """Whether an expression of + - * / and parentheses has every number exactly once, and the value `target`.

    "= TARGET" may follow. Fractions are exact.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        return False
    left, equals, right = expression.translate(_SIGNS).partition("=")
    if equals and right.strip() != str(target):
        return False
    if sorted(map(int, re.findall(r"[0-9]+", left))) != sorted(numbers):
        return False
    try:
        return _value(ast.parse(left.strip(), mode="eval").body) == target
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _value(node: ast.expr) -> Fraction:
    """Value of an expression; ValueError: it has something other than whole numbers and the four operations."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not an expression of whole numbers")


def play_move(numbers: tuple[int, ...], move: str) -> tuple[tuple[int, ...], int] | None:
    """Play a move: returns the remaining numbers, the result last, and the result; None: the move is invalid."""
    parts = _MOVE.fullmatch(move)
    if parts is None:
        return None
    left, sign, right = int(parts[1]), parts[2], int(parts[3])
    remaining = Counter(numbers)
    remaining.subtract((left, right))
    if min(remaining.values()) < 0 or (sign == "/" and (right == 0 or left % right)):
        return None
    made = {"+": left + right, "-": left - right, "*": left * right, "/": left // max(right, 1)}[sign]
    if made < 0:
        return None
    kept = list(numbers)
    kept.remove(left)
    kept.remove(right)
    return (*kept, made), made
