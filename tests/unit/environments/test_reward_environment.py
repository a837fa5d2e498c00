"""Reward functions called as TRL calls them; the functions and their worked examples are those of its documentation."""

import asyncio
import re
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.scores import TrainerState
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.reward_functions import RewardFunctionEnvironment
from megatron_grpo.environments.user_functions import load_reward_function
from tests.support.reward_requests import length_reward, request, wrapped_reward


def format_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) else 0.0 for text in contents]


def boxed_reward(completions: list[str], ground_truth: list[str], **kwargs: Any) -> list[float]:
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]


def math_reward(prompts: list[str], completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
    return [
        (1.0 if completion == "4" else -1.0) if kind == "math" else None
        for completion, kind in zip(completions, task, strict=True)
    ]


def coding_reward(prompts: list[str], completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
    return [
        (1.0 if "def" in completion else -1.0) if kind == "coding" else None
        for completion, kind in zip(completions, task, strict=True)
    ]


def reward_len(completions, **kwargs):  # as it stands in the documentation: no annotations, whole numbers
    return [-abs(20 - len(completion)) for completion in completions]


def environment(*names: str, weights: list[float] | None = None) -> RewardFunctionEnvironment:
    paths = [f"{__name__}.{name}" for name in names]
    built = create_environment(EnvironmentConfig(type="reward_functions", reward_funcs=paths, reward_weights=weights))
    assert isinstance(built, RewardFunctionEnvironment)
    return built


def test_a_function_over_texts() -> None:
    requests = [request("The sky is", " blue."), request("The sun is", " in the sky.")]
    scores = environment("length_reward").score(requests)
    assert [score.reward for score in scores] == [6.0, 12.0]
    assert [score.parts for score in scores] == [{"length_reward": 6.0}, {"length_reward": 12.0}]


def test_whole_numbers_are_rewards_too() -> None:
    scores = environment("reward_len").score([request("a", "x" * 17), request("b", "x" * 24)])
    assert [score.reward for score in scores] == [-3.0, -4.0]
    assert {type(score.parts["reward_len"]) for score in scores} == {float}


def test_a_function_over_conversations() -> None:
    prompts = ["What is the result of (1 + 2) * 4?", "What is the result of (3 + 1) * 2?"]
    responses = [
        "<think>The sum of 1 and 2 is 3, which we multiply by 4 to get 12.</think><answer>(1 + 2) * 4 = 12</answer>",
        "The sum of 3 and 1 is 4, which we multiply by 2 to get 8. So (3 + 1) * 2 = 8.",
    ]
    requests = [
        request([{"role": "assistant", "content": prompt}], response)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    scores = environment("format_reward").score(requests)
    assert [score.reward for score in scores] == [1.0, 0.0]
    assert [score.correct for score in scores] == [None, None], "a format is no answer"


def test_columns_of_the_data_are_keywords() -> None:
    requests = [
        request("Problem: Solve the equation $2x + 3 = 7$.", r" The solution is \boxed{2}.", ground_truth="2"),
        request("Problem: Solve the equation $3x - 5 = 10$.", r" The solution is \boxed{6}.", ground_truth="5"),
    ]
    assert [score.reward for score in environment("boxed_reward").score(requests)] == [1.0, 0.0]


SEED_ROWS = [
    ("What is 2+2?", "4", "math"),
    ("Write a function that returns the sum of two numbers.", "def add(a, b): return a + b", "code"),
    ("What is 3*4?", "12", "math"),
    ("Write a function that returns the product of two numbers.", "def mul(a, b): return a * b", "code"),
]


"""The rows of the example for several tasks: it calls them "code", and its function looks for "coding"."""


def test_none_is_left_out_and_weights_multiply() -> None:
    rows = [("2+2", "4", "math"), ("add", "def f", "coding"), ("2+2", "5", "math")]
    requests = [request(prompt, response, task=task) for prompt, response, task in rows]
    scores = environment("math_reward", "coding_reward", weights=[2.0, 0.5]).score(requests)
    assert [score.reward for score in scores] == [2.0, 0.5, -2.0]
    assert [score.parts for score in scores] == [{"math_reward": 1.0}, {"coding_reward": 1.0}, {"math_reward": -1.0}]


def test_a_response_that_nothing_scores_has_no_reward() -> None:
    requests = [request(prompt, response, task=task) for prompt, response, task in SEED_ROWS]
    scores = environment("math_reward", "coding_reward").score(requests)
    assert [score.reward for score in scores] == [1.0, None, -1.0, None]
    assert [score.parts for score in scores] == [{"math_reward": 1.0}, {}, {"math_reward": -1.0}, {}]


def spoil(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[float]:
    """Changes everything that it is given, as functions do that clean a text in place."""
    for number in range(len(completions)):
        completions[number][0]["content"] = completions[number][0]["content"].lower()
        prompts[number].append({"role": "user", "content": "?"})
        completion_ids[number].clear()
        columns["truth"][number]["values"].pop()
    for values in (prompts, completions, completion_ids, columns["tags"]):
        values.clear()
    return [0.0] * 2


async def spoil_later(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return spoil(prompts, completions, **columns)


@pytest.mark.parametrize("spoiler", [spoil, spoil_later])
def test_a_function_may_change_its_arguments(spoiler: Any) -> None:
    """The next function, and the next sample of the same row, find them as they were."""

    def record(**arguments: Any) -> list[float]:
        calls.append({name: value for name, value in arguments.items() if isinstance(value, list)})
        return [0.0] * 2

    async def record_later(**arguments: Any) -> list[float]:
        await asyncio.sleep(0.01)
        return record(**arguments)

    row = {"truth": {"values": [1, 2]}, "tags": ["a"]}
    prompt = [{"role": "user", "content": "q"}]
    requests = [replace(request(prompt, "ABC", **row), response_ids=np.array([1, 2], np.int32)) for _ in range(2)]
    calls: list[Any] = []
    functions = {"spoiler": spoiler, "record": record, "later": record_later, "again": spoiler}
    RewardFunctionEnvironment(functions, dict.fromkeys(functions, 1.0), None).score(requests)
    full_row = {
        "prompts": [[{"role": "user", "content": "q"}]] * 2,
        "completions": [[{"role": "assistant", "content": "ABC"}]] * 2,
        "completion_ids": [[1, 2]] * 2,
        "truth": [{"values": [1, 2]}] * 2,
        "tags": [["a"]] * 2,
    }
    assert calls == [full_row, full_row]
    assert (row["truth"], prompt) == ({"values": [1, 2]}, [{"role": "user", "content": "q"}])


@pytest.mark.parametrize(
    "rewards",
    [
        np.array([1, 2.5]),
        torch.tensor([1, 2.5]),
        (1, 2.5),
        iter([True, 2.5]),
        {"a": 1, "b": 2.5}.values(),
        deque([1, 2.5]),
    ],
)
def test_lists_of_every_kind_are_rewards(rewards: Any) -> None:
    scores = RewardFunctionEnvironment({"f": lambda completions, **_: rewards}, {"f": 1.0}, None).score(
        [request("a", "b"), request("a", "c")]
    )
    assert [score.reward for score in scores] == [1.0, 2.5]


def test_one_function_says_what_is_correct() -> None:
    requests = [
        request("2+2", "4", task="math"),
        request("2+2", "5", task="math"),
        request("f", "def f", task="coding"),
    ]
    paths = [f"{__name__}.math_reward", f"{length_reward.__module__}.length_reward"]
    named = EnvironmentConfig(type="reward_functions", reward_funcs=paths, correct_func="math_reward")
    assert [score.correct for score in create_environment(named).score(requests)] == [True, False, None]
    unnamed = EnvironmentConfig(type="reward_functions", reward_funcs=paths)
    assert [score.correct for score in create_environment(unnamed).score(requests)] == [None] * 3
    alone = EnvironmentConfig(type="reward_functions", reward_funcs=paths[:1])
    assert [score.correct for score in create_environment(alone).score(requests)] == [None] * 3


def partial_credit(completions: list[str], **_: Any) -> list[float]:
    return [float(text) for text in completions]


def test_a_part_of_the_reward_is_not_correct() -> None:
    requests = [request("a", text) for text in ("1.0", "0.66", "-1", "2")]
    paths = [f"{__name__}.partial_credit"]
    config = EnvironmentConfig(type="reward_functions", reward_funcs=paths, correct_func="partial_credit")
    assert [score.correct for score in create_environment(config).score(requests)] == [True, False, False, True]
    config.correct_from = 0.5
    assert [score.correct for score in create_environment(config).score(requests)] == [True, True, False, True]


def test_a_column_that_a_row_lacks_is_none() -> None:
    columns_seen: dict[str, list[Any]] = {}

    def spy(completions: list[str], **columns: Any) -> list[float]:
        columns_seen.update(columns)
        return [0.0] * len(completions)

    mixed = [request("a", "b", x=1, completion="z"), request("c", "d", y=2)]
    RewardFunctionEnvironment({"spy": spy}, {"spy": 1.0}, None).score(mixed)
    for name in ("completion_ids", "trainer_state", "log_metric", "log_extra"):
        del columns_seen[name]
    assert columns_seen == {"prompts": ["a", "c"], "x": [1, None], "y": [None, 2]}


def test_a_column_that_no_row_of_a_prompt_has_is_none_too() -> None:
    """Others of the same data have it: the check before the run has seen them."""

    def needs(completions: list[str], x: list[Any], y: list[Any], z: int = 3) -> list[float]:
        return [1.0 if (first, second, z) == (None, 2, 3) else 0.0 for first, second in zip(x, y, strict=True)]

    environment = RewardFunctionEnvironment({"needs": needs}, {"needs": 1.0}, None)
    assert [score.reward for score in environment.score([request("a", "b", y=2), request("a", "c", y=2)])] == [1.0, 1.0]


WAITING: list[str] = []


async def wait_for_both(name: str) -> None:
    """Return once both coroutines below wait here."""
    WAITING.append(name)
    async with asyncio.timeout(30):
        while len(WAITING) < 2:
            await asyncio.sleep(0.01)


class Judge:
    """An object whose call is a coroutine."""

    async def __call__(self, completions: list[str], **_: Any) -> list[float | None]:
        await wait_for_both("Judge")
        return [None if text == "?" else 2.0 for text in completions]


async def slow(completions: list[str], **_: Any) -> list[float]:
    await wait_for_both("slow")
    return [1.0] * len(completions)


wrapped_slow = wrapped_reward(slow)


class Settings:
    """A class with a method that rewards by length, and an object of it below."""

    def by_length(self, completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]


settings = Settings()


def test_coroutine_functions_and_objects_are_awaited_together() -> None:
    WAITING.clear()
    scores = environment("wrapped_slow", "Judge", "length_reward").score([request("a", "?"), request("b", "xyz")])
    assert [score.reward for score in scores] == [2.0, 6.0]
    assert scores[0].parts == {"wrapped_slow": 1.0, "length_reward": 1.0}, "a None is left out"
    assert list(scores[1].parts) == ["wrapped_slow", "Judge", "length_reward"], "in the order of the configuration"


def test_a_method_of_an_object_is_found_and_given_only_what_it_takes() -> None:
    function = load_reward_function(f"{__name__}.settings.by_length")
    environment = RewardFunctionEnvironment({"by_length": function}, {"by_length": 0.5}, None)
    assert environment.score([request("a", "four", level=3)])[0].reward == 2.0


def test_functions_are_told_the_tokens_and_how_far_the_run_is() -> None:
    state_seen: dict[str, Any] = {}

    def spy(completions: list[str], completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        state_seen.update(ids=completion_ids, step=trainer_state.global_step, of=trainer_state.max_steps)
        return [0.0] * len(completions)

    trained = replace(
        request("a", "b"), response_ids=np.array([5, 6], np.int32), trainer_state=TrainerState(global_step=7)
    )
    RewardFunctionEnvironment({"spy": spy}, {"spy": 1.0}, None).score([trained])
    assert state_seen == {"ids": [[5, 6]], "step": 7, "of": 0}


def test_what_functions_log_is_kept() -> None:
    def logs(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log_metric("parsed", 0.25)
        log_metric("parsed", 0.75)
        log_extra("words", [text.split() for text in completions])
        return [0.0] * len(completions)

    scores = RewardFunctionEnvironment({"logs": logs}, {"logs": 1.0}, None).score(
        [request("a", "x y"), request("b", "")]
    )
    assert [score.metrics for score in scores] == [{"parsed": 0.5}] * 2
    assert [score.notes for score in scores] == [{"words": '["x", "y"]'}, {"words": "[]"}]
