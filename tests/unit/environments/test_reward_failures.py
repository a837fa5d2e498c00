"""Reward functions that fail, answer wrongly or late: what is told, called again or left out."""

import asyncio
import json
import math
import re
import time
from typing import Any

import numpy as np
import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.environments.reward_functions import RewardFunctionEnvironment
from tests.support.reward_requests import length_reward, request, wrapped_reward


def raises_on_c(completions: list[str], **_: Any) -> list[float]:
    return [1.0 / (completion != "c") for completion in completions]


def one_too_few(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def give_nothing(completions: list[str], **_: Any) -> None:
    return None


def words(completions: list[str], **_: Any) -> list[str]:
    return list(completions)


def by_number(completions: list[str], **_: Any) -> dict[int, float]:
    return dict.fromkeys(range(len(completions)), 5.0)


def by_value(completions: list[str], **_: Any) -> set[float]:
    return {float(number) for number, _ in enumerate(completions)}


def as_text(completions: list[str], **_: Any) -> str:
    return "1" * len(completions)


def as_texts(completions: list[str], **_: Any) -> list[str]:
    return ["1.5"] * len(completions)


def one_too_many(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) + 1)


async def not_a_number(completions: list[str], **_: Any) -> Any:
    return np.full(len(completions), np.nan)


def endless(completions: list[str], **_: Any) -> list[float]:
    return [-math.inf] * len(completions)


def as_scalar(completions: list[str], **_: Any) -> Any:
    return np.array(1.0)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raises_on_c, r"raised ZeroDivisionError: .* \(test_reward_failures.py:\d+\)"),
        (one_too_few, "returned 1 reward for 2 completions"),
        (give_nothing, "returned NoneType for 2 completions, and no list of rewards"),
        (
            words,
            "returned 2 rewards for 2 completions, and among them something that is neither a number nor None: .*'b'",
        ),
        (by_number, "returned dict for 2 completions, and no list of rewards"),
        (by_value, "returned set for 2 completions, and no list of rewards"),
        (as_text, "returned str for 2 completions, and no list of rewards"),
        (as_texts, ".* neither a number nor None: '1.5' is a text"),
        (as_scalar, "returned ndarray for 2 completions, and no list of rewards"),
        (one_too_many, "returned 3 rewards for 2 completions"),
        (not_a_number, "returned 2 rewards for 2 completions, .*: nan is no reward; None says"),
        (endless, "returned 2 rewards for 2 completions, .*: -inf is no reward; None says"),
    ],
)
def test_what_a_function_does_wrong_is_told_with_its_name(function: Any, text: str) -> None:
    broken = RewardFunctionEnvironment({"one": function}, {"one": 1.0}, None)
    with pytest.raises(RunError, match=rf"^{re.escape(function.__module__)}\.{function.__name__} {text}"):
        broken.score([request("a", "b"), request("a", "c")])


def test_a_failure_can_count_as_having_no_opinion(caplog: pytest.LogCaptureFixture) -> None:
    functions = {"bad": raises_on_c, "good": length_reward}
    tolerant = RewardFunctionEnvironment(functions, dict.fromkeys(functions, 1.0), None, tolerant=True)
    for _ in range(2):
        scores = tolerant.score([request("a", "b"), request("a", "c")])
        assert [(score.reward, score.errors) for score in scores] == [(1.0, 1), (1.0, 1)], "of the whole group"
        assert [score.retries for score in scores] == [1, 0]
        assert scores[1].parts == {"good": 1.0}
    messages = [record.message for record in caplog.records]
    pattern = r"\.raises_on_c raised \w+: .* \(test_reward_failures\.py:\d+\)"
    assert [re.search(f"{pattern}; (its reward is None|the function is called again)", text) for text in messages]
    assert sum("its reward is None" in text for text in messages) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_fails_once_is_called_again_with_its_group(is_async: bool) -> None:
    """Rewards relative to a group are those of the group, never of a response alone."""
    sizes: list[int] = []

    def rank(completions: list[str], **_: Any) -> list[float]:
        sizes.append(len(completions))
        if len(sizes) == 1:
            json.loads("[")  # raises in a library
        return [float(sorted(completions).index(text)) for text in completions]

    async def rank_later(completions: list[str], **_: Any) -> list[float]:
        return rank(completions)

    function = rank_later if is_async else rank
    tolerant = RewardFunctionEnvironment({"rank": function}, {"rank": 1.0}, None, tolerant=True)
    scores = tolerant.score([request("a", text) for text in "cab"])
    assert ([score.reward for score in scores], sizes) == ([2.0, 0.0, 1.0], [3, 3])
    assert [score.retries for score in scores] == [1, 0, 0]
    sizes.clear()
    failing = RewardFunctionEnvironment({"rank": function}, {"rank": 1.0}, None)
    with pytest.raises(RunError, match=r"raised JSONDecodeError: .* \(test_reward_failures\.py:\d+\)$"):
        failing.score([request("a", text) for text in "cab"])


@pytest.mark.parametrize("function", [one_too_few, one_too_many, words, not_a_number])
def test_a_failure_that_is_ignored_is_no_wrong_number_of_rewards(function: Any) -> None:
    tolerant = RewardFunctionEnvironment({"one": function}, {"one": 1.0}, None, tolerant=True)
    with pytest.raises(RunError, match="for 2 completions"):
        tolerant.score([request("a", "b"), request("a", "c")])


def stuck(completions: list[str], **_: Any) -> list[float]:
    try:
        time.sleep(30)
    except Exception:  # noqa: BLE001 - as reward functions have it: they must not fail for what a model wrote
        return [1.0] * len(completions)
    return [0.0] * len(completions)


async def stuck_coroutine(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(30)
    return [0.0] * len(completions)


@pytest.mark.parametrize("function", [stuck, stuck_coroutine, wrapped_reward(stuck_coroutine)])
def test_a_function_that_is_late_is_ended(function: Any) -> None:
    requests = [request("a", "b"), request("a", "c")]
    limited = RewardFunctionEnvironment({"one": function}, {"one": 1.0}, None, timeout_s=0.1)
    with pytest.raises(RunError, match=rf"{function.__name__} gave no rewards within reward_timeout_s=0\.1 s"):
        limited.score(requests)
    tolerant = RewardFunctionEnvironment({"one": function}, {"one": 1.0}, None, timeout_s=0.1, tolerant=True)
    started = time.monotonic()
    assert [(score.reward, score.errors) for score in tolerant.score(requests)] == [(None, 1), (None, 1)]
    assert time.monotonic() - started < 5


def asks_in_vain(completions: list[str], **_: Any) -> list[float]:
    raise TimeoutError


async def asks_in_vain_for_a_while(completions: list[str], **_: Any) -> list[float]:
    await asyncio.wait_for(asyncio.Event().wait(), 0.01)
    return []


@pytest.mark.parametrize("function", [asks_in_vain, asks_in_vain_for_a_while])
def test_a_deadline_of_the_functions_own_is_not_that_of_the_configuration(function: Any) -> None:
    limited = RewardFunctionEnvironment({"one": function}, {"one": 1.0}, None, timeout_s=60)
    with pytest.raises(RunError, match=rf"{function.__name__} raised TimeoutError"):
        limited.score([request("a", "b")])
