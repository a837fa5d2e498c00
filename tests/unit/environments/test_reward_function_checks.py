"""Reward functions are loaded and checked before anything starts."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import Config, EnvironmentConfig
from megatron_grpo.environments.user_functions import load_reward_function
from megatron_grpo.preflight.environment_checks import check_scoring
from tests.support.reward_requests import length_reward


def scored_by(*entries: str) -> Config:
    environment = EnvironmentConfig(type="reward_functions", reward_funcs=list(entries))
    return Config(env={"task": environment}, data=DataConfig(task_name="task"))


not_a_function = 3


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
def turned_into_positions(**columns: Any) -> list[float]:
    return by_position(columns["prompts"], columns["completions"])


def test_parameters_by_position_are_refused_before_anything_starts() -> None:
    entries = {f"{__name__}.by_position": None, "given.by_position": {"given.by_position": by_position}}
    for entry, number in entries.items():
        with pytest.raises(ConfigError, match="it takes prompts, completions by position only: leave the / out"):
            check_scoring(scored_by(entry), sets=[], rewards=number)
    assert load_reward_function(f"{__name__}.turned_into_positions") is turned_into_positions


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
