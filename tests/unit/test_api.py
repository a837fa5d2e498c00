"""What a script gives, as the command line would have it: nothing is started here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import megatron_grpo
from megatron_grpo import api
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.given import Given
from tests.integration.example_rewards import right

ROWS = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n:03d}"} for n in range(10, 74)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, Given]]:
    """Configurations that would have been run, each with what was given beside it."""
    seen: list[tuple[Config, Given]] = []
    monkeypatch.setattr(api, "start", lambda config, given: seen.append((config, given)))
    return seen


def test_a_mapping_is_a_command_line(started: list[tuple[Config, Given]], tmp_path: Path) -> None:
    run = megatron_grpo.train(
        {"+exp": "quickstart", "run_dir": str(tmp_path / "r"), "generation.stop_token_ids": [1, 2]}
    )
    ((config, given),) = started
    assert run.run_dir == tmp_path / "r"
    expected = compose_config(["+exp=quickstart", f"run_dir={tmp_path / 'r'}", "generation.stop_token_ids=[1,2]"])
    assert config == expected
    assert given == Given(rewards={}, callbacks=())
    assert run.metrics == []


@pytest.mark.parametrize("form", ["list", "dataset", "path"])
def test_datasets_and_rewards(started: list[tuple[Config, Given]], tmp_path: Path, form: str) -> None:
    def mine(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    dataset = {"list": ROWS, "dataset": Dataset.from_list(ROWS), "path": path}[form]
    megatron_grpo.train(
        ["+exp=quickstart", f"run_dir={tmp_path / 'r'}", "env.addition.reward_weights=[1,0.5]", "checkpointing=none"],
        train_dataset=dataset,
        val_dataset={"easy": ROWS[:8], "hard": ROWS[8:]},
        rewards=[right, mine],
    )
    ((config, given),) = started
    entries = ["tests.integration.example_rewards.right", "given.mine"]
    assert (config.env["addition"].type, config.env["addition"].reward_funcs) == ("reward_functions", entries)
    assert given.rewards == {"given.mine": mine}
    (training,) = config.data.training.values()
    assert Path(training.path).is_file()
    assert {key.split(".")[2] for key in config.data.validation} == {"easy", "hard"}
    assert config.grpo.max_num_steps == 400


def test_a_dataset_without_answers_has_none(started: list[tuple[Config, Given]], tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    base = ["+exp=quickstart", f"run_dir={tmp_path / 'r'}", "checkpointing=none"]
    megatron_grpo.train(base, train_dataset=rows, rewards=[right])
    assert started[0][0].data.answer_key is None
    assert started[0][0].data.validation == {}


def test_mistakes_are_told_and_leave_nothing(started: list[tuple[Config, Given]], tmp_path: Path) -> None:
    base = ["+exp=quickstart", f"run_dir={tmp_path / 'r'}"]
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": {3}}]
    with pytest.raises(ConfigError, match=r"val_dataset\[1\] +cannot be kept as JSON: .* set .*; give numbers, texts"):
        megatron_grpo.train(base, train_dataset=ROWS, val_dataset=rows)
    assert not (tmp_path / "r" / "data").exists()
    with pytest.raises(ConfigError, match=r"train_dataset +is int; give a list of dicts"):
        megatron_grpo.train(base, train_dataset=3)
    with pytest.raises(ConfigError, match="fewer than the 32 prompts"):
        megatron_grpo.train([*base, "checkpointing=none"], train_dataset=ROWS[:5])
    assert not (tmp_path / "r" / "data").exists()
    with pytest.raises(ConfigError, match="has two functions called reward"):
        megatron_grpo.train(base, rewards=[lambda completions: [], lambda completions: []])
    with pytest.raises(ConfigError, match="has its data and environments already"):
        megatron_grpo.train(compose_config(["+exp=quickstart"]), rewards=[right])
    assert started == []


def test_environments_are_named_by_where_they_are(tmp_path: Path) -> None:
    written = api._environment_overrides({"math": "math", "mine": Given})
    assert written == ["env.math.type=math", "env.mine.type=megatron_grpo.run.given:Given"]
    local = type("Local", (), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match="cannot be imported by the processes of the run"):
        api._environment_overrides({"mine": local})
