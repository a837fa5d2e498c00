"""Reward functions called as TRL calls them; the functions and their worked examples are those of its documentation."""

import asyncio
import functools
import json
import math
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import Config, EnvironmentConfig
from megatron_grpo.data.scores import EnvironmentRequest, TrainerState
from megatron_grpo.environments.registry import create_environment
from megatron_grpo.environments.reward_functions import RewardFunctionEnvironment
from megatron_grpo.environments.user_functions import load_reward_function
from megatron_grpo.preflight.environment_checks import check_scoring


def scored_by(*entries: str) -> Config:
    environment = EnvironmentConfig(type="reward_functions", reward_funcs=list(entries))
    return Config(env={"task": environment}, data=DataConfig(task_name="task"))


def length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


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


not_a_function = 3


def request(prompt: str | list[dict[str, str]], response: str, **columns: Any) -> EnvironmentRequest:
    return EnvironmentRequest(prompt=prompt, response=response, stop_reason="stop", extra_env_info=columns)


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
    paths = [f"{__name__}.math_reward", f"{__name__}.length_reward"]
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
        (raises_on_c, r"raised ZeroDivisionError: .* \(test_reward_environment.py:\d+\)"),
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


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no_such_module.reward", "No module named 'no_such_module'"),
        (f"{__name__}.no_such_reward", "no attribute 'no_such_reward'"),
        (f"{__name__}.not_a_function", "is int, which cannot be called"),
        ("builtins.len", "must take prompts and completions by name"),
        ("tests.unit.broken_rewards.reward", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_a_function_that_is_not_there_is_one_clear_error(path: str, text: str) -> None:
    with pytest.raises(RunError, match=f"reward function {re.escape(path)} .*{text}"):
        load_reward_function(path)


def test_functions_are_checked_before_anything_starts() -> None:
    names = [f"{__name__}.length_reward", "no_such_module.reward", "builtins.len"]
    with pytest.raises(ConfigError) as caught:
        check_scoring(scored_by(*names), sets=[])
    assert [problem.subject for problem in caught.value.problems] == [
        "env.task.reward_funcs=no_such_module.reward",
        "env.task.reward_funcs=builtins.len",
    ]


def by_position(prompts: list[str], completions: list[str], /, **_: Any) -> list[float]:
    return [1.0] * len(completions)


@functools.wraps(by_position)
def turned_into_positions(**base_overrides: Any) -> list[float]:
    return by_position(base_overrides["prompts"], base_overrides["completions"])


def test_parameters_by_position_are_refused_before_anything_starts() -> None:
    entries = {f"{__name__}.by_position": None, "given.by_position": {"given.by_position": by_position}}
    for entry, number in entries.items():
        with pytest.raises(ConfigError, match="it takes prompts, completions by position only: leave the / out"):
            check_scoring(scored_by(entry), sets=[], rewards=number)
    assert load_reward_function(f"{__name__}.turned_into_positions") is turned_into_positions


class Judge:
    """An object whose call is a coroutine."""

    async def __call__(self, completions: list[str], **_: Any) -> list[float | None]:
        await asyncio.sleep(0.3)
        return [None if text == "?" else 2.0 for text in completions]


async def slow(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0.3)
    return [1.0] * len(completions)


def wrapped_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """An ordinary function around another one, as many decorators make it."""

    @functools.wraps(function)
    def call(*positions: Any, **names: Any) -> Any:
        return function(*positions, **names)

    return call


wrapped_slow = wrapped_reward(slow)


class Settings:
    """A class with a method that rewards by length, and an object of it below."""

    def by_length(self, completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]


settings = Settings()


def test_coroutine_functions_and_objects_are_awaited_together() -> None:
    started = time.monotonic()
    scores = environment("wrapped_slow", "Judge", "length_reward").score([request("a", "?"), request("b", "xyz")])
    assert time.monotonic() - started < 0.55, "one after the other they take 0.6 s"
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


def test_a_failure_can_count_as_having_no_opinion(caplog: pytest.LogCaptureFixture) -> None:
    functions = {"bad": raises_on_c, "good": length_reward}
    tolerant = RewardFunctionEnvironment(functions, dict.fromkeys(functions, 1.0), None, tolerant=True)
    for _ in range(2):
        scores = tolerant.score([request("a", "b"), request("a", "c")])
        assert [(score.reward, score.errors) for score in scores] == [(1.0, 1), (1.0, 1)], "of the whole group"
        assert [score.retries for score in scores] == [1, 0]
        assert scores[1].parts == {"good": 1.0}
    messages = [record.message for record in caplog.records]
    pattern = r"\.raises_on_c raised \w+: .* \(test_reward_environment\.py:\d+\)"
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
    with pytest.raises(RunError, match=r"raised JSONDecodeError: .* \(test_reward_environment\.py:\d+\)$"):
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


def needs_level(completions: list[str], level: list[int], bonus: float = 1.0) -> list[float]:
    return [bonus * row_level for row_level in level]


def test_columns_that_a_function_needs_are_looked_for_before_anything_starts(tmp_path: Path) -> None:
    def rows(name: str, **columns: str) -> list[DatasetConfig]:
        (tmp_path / name).write_text(json.dumps({"prompt": "?", "answer": "!", **columns}) + "\n")
        return [DatasetConfig(path=str(tmp_path / name))]

    config = scored_by(f"{__name__}.needs_level")
    check_scoring(config, rows("with_level.jsonl", level="1"))
    check_scoring(config, sets=[])
    with pytest.raises(ConfigError, match="takes level, and the data has no such column; it has answer, prompt"):
        check_scoring(config, rows("without.jsonl"))
    check_scoring(config, rows("without.jsonl"), {f"{__name__}.needs_level": length_reward})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "is not a folder of a model"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "is of Qwen3ForCausalLM; a reward model is one for sequence"),
        ('{"architectures": ["Qwen3ForSequenceClassification"]}', "has 2 labels; a reward model has one"),
    ],
)
def test_a_folder_that_is_no_reward_model_is_one_clear_error(tmp_path: Any, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=text):
        check_scoring(scored_by(str(tmp_path)), sets=[])
