"""The countdown game by its rules, and formats by regular expressions."""

from __future__ import annotations

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.scores import EnvironmentRequest
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.tasks import CountdownEnvironment, played


@pytest.mark.parametrize(
    ("move", "left"),
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
def test_moves(move: str, left: tuple[int, ...] | None) -> None:
    result = played((3, 5, 8), move)
    assert (None if result is None else result[0]) == left


def test_a_game_is_won_lost_or_goes_on() -> None:
    game = CountdownEnvironment(board="{result} made, {numbers} left", separator=",")
    start = game.reset("", {"numbers": [3, 5, 8], "target": 10})
    first = game.step(start, "5+8")
    assert (first.done, first.text) == (False, "13 made, 3,13 left")
    won, lost, illegal = (game.step(first.state, move) for move in ("13-3", "13+3", "5+8"))
    assert (won.done, lost.done, illegal.done) == (True, True, True)
    requests = [
        EnvironmentRequest(prompt="", response="", stop_reason="stop", extra_env_info={}, state=turn.state)
        for turn in (won, lost, illegal, first)
    ]
    assert [one.reward for one in game.score(requests)] == [1.0, 0.0, 0.0, 0.0]
    assert [one.correct for one in game.score(requests)] == [True, False, False, False]


def test_formats() -> None:
    def rewards(pattern: str, whole: bool, *responses: str) -> list[float | None]:
        options = {"pattern": pattern, "whole": whole}
        environment = create_environment(EnvironmentConfig(type="format", options=options))
        requests = [
            EnvironmentRequest(prompt="", response=one, stop_reason="stop", extra_env_info={}) for one in responses
        ]
        return [one.reward for one in environment.score(requests)]

    tags = r"(?s)<think>.*</think>\s*<answer>.*</answer>"
    assert rewards(tags, True, "<think>a\nb</think>\n<answer>1</answer>", "<answer>1</answer>") == [1.0, 0.0]
    assert rewards(r"\d", False, "a1", "a") == [1.0, 0.0]
    assert rewards(r"\d", True, "a1", "1") == [0.0, 1.0]
    with pytest.raises(RunError, match="is not a regular expression"):
        rewards("(", True, "")
