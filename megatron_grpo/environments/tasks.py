"""Environments without tools: exact sums, patterns, mathematical answers, the Countdown game."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator

from megatron_grpo.cluster.limited_calls import LimitedCalls, LimitError
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, Turn
from megatron_grpo.data.specs import parse_countdown_game
from megatron_grpo.environments.interface import Environment, score_zero_or_one
from megatron_grpo.environments.math_answers import Verifier


class AdditionEnvironment(Environment):
    """Reward 1 for exactly the text of the answer, else 0.

    "095" is right for the answer "095"; "95", " 095" and "0950" are not.
    """

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return score_zero_or_one(request.response == request.extra_env_info[REFERENCE] for request in requests)


class UnscoredEnvironment(Environment):
    """No reward, for distillation alone: prompts need no answer."""

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return [EnvironmentReturn(reward=None, correct=None) for _ in requests]


def _require_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return pattern


@dataclass(eq=False)
class FormatEnvironment(Environment):
    """Reward 1 for a response that matches a regular expression, else 0."""

    pattern: Annotated[str, AfterValidator(_require_pattern)]
    """Regular expression in Python's syntax; with "(?s)" at its beginning, "." also matches line ends."""
    whole: bool = True
    """Whether the whole response must match; else a part of it is enough."""

    def __post_init__(self) -> None:
        # In a process that can be ended: some expressions take exponential time on some responses.
        self._matches = LimitedCalls(partial(_make_matcher, self.pattern, self.whole), cpu_s=_MATCH_CPU_S)

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return score_zero_or_one(self._is_match(request.response) for request in requests)

    def _is_match(self, response: str) -> bool:
        try:
            return self._matches.call(_call_matcher, response)
        except LimitError:
            return False


_MATCH_CPU_S = 1.0  # a response on which the expression takes longer does not match


def _make_matcher(pattern: str, whole: bool) -> Callable[[str], Any]:
    expression = re.compile(pattern)
    return expression.fullmatch if whole else expression.search


def _call_matcher(find: Callable[[str], Any], response: str) -> bool:
    return find(response) is not None


class MathEnvironment(Environment):
    """Reward 1 when the final answer equals the reference in value.

    "1/2", "0.5" and "\\\\frac12" are equal. The final answer is the content of the last box, or else the last
    expression that math-verify finds.
    """

    def __init__(self) -> None:
        self._verifier = Verifier()

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        pairs = [(request.response, str(request.extra_env_info[REFERENCE])) for request in requests]
        return score_zero_or_one(self._verifier.verify(pairs))


_ANSWER = "<answer>"
_LONGEST_EXPRESSION = 400  # characters
_MOVE = re.compile(r"\s*([0-9]{1,9})\s*([-+*/])\s*([0-9]{1,9})\s*")


@dataclass(frozen=True, slots=True)
class Board:
    """State of a game."""

    numbers: tuple[int, ...]  # remaining numbers, in the order in which the model reads them
    target: int
    won: bool = False


@dataclass(eq=False)
class CountdownEnvironment(Environment):
    """Reward 1 when the model makes the target from the numbers.

    The row has them in its columns `numbers` (or `nums`) and `target`.

    Every turn is one move, "a+b", "a-b", "a*b" or "a/b", with two of the remaining numbers. The result, a whole number
    of at least 0, replaces them, and the environment lists the remaining numbers. The game ends with an invalid move or
    when one number remains. A turn may also be a whole solution, as prompts of the public data set ask for it: an
    expression of all remaining numbers between the turn's last <answer> and </answer>.
    """

    multi_turn = True
    board: str = "{result}. Left: {numbers}. Your move:"
    """The environment's text after a move; {result} and {numbers} are filled in."""
    separator: str = " "
    """Text between the numbers."""

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Board:
        numbers, target = parse_countdown_game(extra_env_info)
        return Board(tuple(numbers), target)

    def step(self, state: Board, response: str) -> Turn:
        if _ANSWER in response:
            expression = response.rpartition(_ANSWER)[2].partition("</answer>")[0]
            return Turn(state=replace(state, won=is_solution(expression, state.numbers, state.target)))
        result = play_move(state.numbers, response)
        if result is None:
            return Turn(state=state)
        numbers, value = result
        state = Board(numbers, state.target, won=value == state.target)
        if state.won or len(numbers) == 1:
            return Turn(state=state)
        text = self.board.replace("{numbers}", self.separator.join(map(str, numbers)))
        return Turn(done=False, state=state, text=text.replace("{result}", str(value)))

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return score_zero_or_one(request.state.won for request in requests)


_SIGNS = str.maketrans({"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-"})
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def is_solution(expression: str, numbers: Sequence[int], target: int) -> bool:
    """Check that an expression uses every number once and equals `target`.

    It may have + - * / and parentheses, and "= TARGET" may follow. Fractions are exact.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        return False
    formula, equals, value = expression.translate(_SIGNS).partition("=")
    if equals and value.strip() != str(target):
        return False
    if sorted(map(int, re.findall(r"[0-9]+", formula))) != sorted(numbers):
        return False
    try:
        return _evaluate(ast.parse(formula.strip(), mode="eval").body) == target
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not an expression of whole numbers")


def play_move(numbers: tuple[int, ...], move: str) -> tuple[tuple[int, ...], int] | None:
    """Play a move: remaining numbers and result, or None if invalid."""
    match = _MOVE.fullmatch(move)
    if match is None:
        return None
    first, sign, second = int(match[1]), match[2], int(match[3])
    remaining = list(numbers)
    try:
        remaining.remove(first)
        remaining.remove(second)
    except ValueError:
        return None
    if sign == "/" and (second == 0 or first % second):
        return None
    result = {"+": first + second, "-": first - second, "*": first * second, "/": first // max(second, 1)}[sign]
    return None if result < 0 else ((*remaining, result), result)
