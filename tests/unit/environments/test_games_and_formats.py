"""The countdown game by its rules, and formats by regular expressions."""

import itertools
import re
from collections import Counter
from fractions import Fraction  # noqa: F401 - for eval

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.data.specs import from_countdown
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.tasks import CountdownEnvironment, is_solution, play_move


@pytest.mark.parametrize(
    ("move", "numbers_left"),
    [
        ("3+5", (8, 8)),
        (" 8 - 3 ", (5, 5)),
        ("5*8", (3, 40)),
        ("8/8", None),
        ("8/3", None),
        ("3-5", None),
        ("3+3", None),
        ("3+5+8", None),
        ("3+", None),
        ("", None),
        ("__import__('os')", None),
        ("٣+٥", None),
    ],
)
def test_moves(move: str, numbers_left: tuple[int, ...] | None) -> None:
    result = play_move((3, 5, 8), move)
    assert (None if result is None else result[0]) == numbers_left


def test_a_game_is_won_lost_or_goes_on() -> None:
    game = CountdownEnvironment(board="{result} made, {numbers} left", separator=",")
    start = game.reset("", {"numbers": [3, 5, 8], "target": 10})
    first = game.step(start, "5+8")
    assert (first.done, first.text) == (False, "13 made, 3,13 left")
    won, lost_turn, illegal = (game.step(first.state, move) for move in ("13-3", "13+3", "5+8"))
    assert (won.done, lost_turn.done, illegal.done) == (True, True, True)
    requests = [
        EnvironmentRequest(prompt="", response="", stop_reason="stop", extra_env_info={}, state=turn.state)
        for turn in (won, lost_turn, illegal, first)
    ]
    assert [score.reward for score in game.score(requests)] == [1.0, 0.0, 0.0, 0.0]
    assert [score.correct for score in game.score(requests)] == [True, False, False, False]


@pytest.mark.parametrize("columns", [("numbers",), ("nums",), ("numbers", "nums")])
def test_the_public_sets_rows_are_games(columns: tuple[str, ...]) -> None:
    game = CountdownEnvironment()
    row = {"target": 6, **{name: [1, 2, 3] for name in columns}}
    state = game.reset("", {**row, "task_name": "countdown"})
    turn = game.step(game.step(state, "1+2").state, "3+3")
    assert (turn.done, turn.state.won) == (True, True)
    answered = game.step(state, "<think>1+2 is 3</think> <answer> 1 </answer> no: <answer> (1 + 2) + 3 = 6 </answer>")
    assert (answered.done, answered.state.won) == (True, True)


def test_the_prompt_of_the_public_set_asks_for_what_the_game_takes() -> None:
    row = from_countdown({"nums": [1, 2, 3], "target": 1})
    example = row["prompt"].rpartition("for example ")[2].rstrip(".")
    game = CountdownEnvironment()
    assert game.step(game.reset(row["prompt"], row), example).state.won


def test_solutions_are_those_of_pythons_arithmetic() -> None:
    """Every expression of the three numbers, against eval with fractions."""
    numbers, target, shapes = (2, 3, 4), 2, ("{}{}{}{}{}", "({}{}{}){}{}", "{}{}({}{}{})")
    counts = Counter(True for _ in ())
    for order in itertools.permutations(numbers):
        for first, second in itertools.product("+-*/", repeat=2):
            for shape in shapes:
                text = shape.format(order[0], first, order[1], second, order[2])
                exact = eval(re.sub(r"(\d)", r"Fraction(\1)", text))
                assert is_solution(text, numbers, target) is (exact == target), text
                counts[exact == target] += 1
    assert counts[True] > 3
    assert is_solution("8 ÷ (3 − 8÷3)", (8, 3, 8, 3), 24)


NO_SOLUTIONS = (
    *("", "1+2", "1+2+3+0", "1+2+3 = 7", "1+2+3)", "1*2*3.0", "6", "2**3-2", "__import__('os')", "1+2+3" + " " * 400),
    *("1//2+3*2", "(1+2+3", "-1+2+3", "1,2,3", "1/0*2+3", "max(1,2,3)*2", "(" * 200 + "1+2+3" + ")" * 200),
)


@pytest.mark.parametrize("text", NO_SOLUTIONS)
def test_what_is_no_solution(text: str) -> None:
    assert not is_solution(text, (1, 2, 3), 6)


def test_formats() -> None:
    def rewards(pattern: str, is_whole: bool, *responses: str) -> list[float | None]:
        options = {"pattern": pattern, "whole": is_whole}
        environment = create_environment(EnvironmentConfig(type="format", options=options))
        requests = [
            EnvironmentRequest(prompt="", response=response, stop_reason="stop", extra_env_info={})
            for response in responses
        ]
        return [response.reward for response in environment.score(requests)]

    tags = r"(?s)<think>.*</think>\s*<answer>.*</answer>"
    assert rewards(tags, True, "<think>a\nb</think>\n<answer>1</answer>", "<answer>1</answer>") == [1.0, 0.0]
    assert rewards(r"\d", False, "a1", "a") == [1.0, 0.0]
    assert rewards(r"\d", True, "a1", "1") == [0.0, 1.0]
    with pytest.raises(RunError, match="is not a regular expression"):
        rewards("(", True, "")
