"""Columns with the names of arguments: agents and reward functions are called all the same, and the check says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config, DataConfig
from megatron_grpo.data.scores import EnvironmentRequest, ModelAccess
from megatron_grpo.environments.reward_functions import RewardFunctionEnvironment
from megatron_grpo.environments.user_functions import check_columns
from megatron_grpo.preflight.data_checks import check_prompt_files

ACCESS = ModelAccess("url", "token", "model")
NAMES = (
    *("access", "prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"),
    *("self", "agent_result", "prompt", "completion"),
)


class Callable:
    """An agent and a reward function that is an object, whose own argument is `self`."""

    def __init__(self) -> None:
        self.columns: list[dict[str, Any]] = []

    def __call__(self, prompt: Any = None, access: Any = None, **columns: Any) -> Any:
        self.columns.append(columns)
        return [1.0] if isinstance(columns.get("prompts"), list) else "done"


@pytest.mark.parametrize("name", NAMES)
def test_a_column_with_the_name_of_an_argument_breaks_no_call(name: str) -> None:
    agent, reward = Callable(), Callable()
    environment = RewardFunctionEnvironment(
        functions={"reward": reward}, weights={"reward": 1.0}, correctness=None, agent_function=agent
    )
    row = {name: "of the row", "level": 3}
    assert environment.act("p", row, ACCESS) == "done"
    request = EnvironmentRequest(prompt="p", response="r", stop_reason="stop", extra_env_info=row, state="done")
    (score,) = environment.score([request])
    assert score.reward == 1.0
    assert agent.columns[0]["level"] == 3
    assert (reward.columns[0]["prompts"], reward.columns[0]["completions"]) == (["p"], ["r"])
    assert reward.columns[0]["agent_result"] == ["done"]


def test_an_agent_gets_the_columns_that_it_takes() -> None:
    def agent(prompt: str, access: ModelAccess, level: int = 0) -> int:
        return level

    environment = RewardFunctionEnvironment(functions={}, weights={}, correctness=None, agent_function=agent)
    assert environment.act("p", {"level": 3, "other": 4}, ACCESS) == 3
    with pytest.raises(RunError, match=r"agent a.b takes level, and the data has no such column; it has answer"):
        check_columns("agent a.b", lambda prompt, access, level: 0, ("prompt", "access"), {"answer"})


def test_the_check_names_columns_that_do_not_arrive(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"p{n}", "answer": "1", "access": "x", "completions": [], "self": 1, "level": 3} for n in (1, 2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = EnvironmentConfig(type="reward_functions", reward_funcs=["a.b"], agent_func="a.c")
    config = Config(env={"game": environment}, data=DataConfig(train_path=str(file), task_name="game"))
    texts = [remark.text for remark in check_prompt_files(config)[1]]
    assert [text for text in texts if "does not reach" in text] == [
        "has the column completions, self, which does not reach reward functions of env.game, because an argument "
        "has this name; give the column another name to pass it",
        "has the column access, self, which does not reach the agent of env.game, because an argument has this name; "
        "give the column another name to pass it",
    ]
    assert sys.modules.get("a") is None, "nothing was imported"
