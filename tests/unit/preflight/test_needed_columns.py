"""Columns that environments read are looked for in the rows before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.schema import Config, DataConfig, EnvironmentConfig
from megatron_grpo.data.rows import examine_set
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment
from megatron_grpo.preflight.environment_checks import check_scoring


class Guessing(Environment):
    needs_columns = ("number", "limit")

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        return [EnvironmentReturn(reward=0.0, correct=None) for _ in requests]


def of_rows(path: Path, kind: str, *rows: dict[str, Any], **data: Any) -> Config:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config(
        env={"game": EnvironmentConfig(type=kind)},
        data=DataConfig(train_path=str(path), task_name="game", **{"answer_key": None, **data}),
    )


def problems_of(config: Config) -> list[str]:
    assert config.data.train_path is not None
    kinds = {name: environment.type for name, environment in config.env.items()}
    return [
        problem.text for problem in examine_set(DatasetConfig(path=config.data.train_path), config.data, kinds).problems
    ]


PROMPT = {"prompt": "1 2 3"}


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"numbers": [1, 2], "target": 3}, None),
        ({"nums": [1, 2], "target": 3}, None),
        ({"target": 3}, "has no column 'numbers' or 'nums', which a countdown game needs; it has prompt, target"),
        ({"numbers": None, "target": 3}, "has no column 'numbers' or 'nums'"),
        ({"nums": [1, 2]}, "has no column 'target'"),
        ({"nums": ["1", 2], "target": 3}, "column 'nums' is not a list of whole numbers"),
        ({"numbers": [1.5], "target": 3}, "column 'numbers' is not a list of whole numbers"),
        ({"nums": [1, 2], "target": "three"}, "column 'target' is not a whole number"),
    ],
)
def test_rows_of_a_countdown_game(tmp_path: Path, columns: dict[str, Any], text: str | None) -> None:
    problems = problems_of(of_rows(tmp_path / "rows.jsonl", "countdown", {**PROMPT, **columns}))
    assert (problems == []) if text is None else (len(problems) == 1 and problems[0].startswith(text)), problems


def test_rows_of_the_public_set_play_the_game(tmp_path: Path) -> None:
    rows = [{"nums": [1, 2, 3], "target": 6}, {"nums": [4, 5, 6], "target": 15}]
    config = of_rows(tmp_path / "rows.jsonl", "countdown", *rows, processor="countdown", answer_key="answer")
    assert problems_of(config) == []
    config.loop.max_rollout_turns = 4
    check_scoring(config)


def test_an_environment_of_ones_own_says_what_it_reads(tmp_path: Path) -> None:
    kind = f"{__name__}:Guessing"
    full_row = {**PROMPT, "number": 1, "limit": 2}
    check_scoring(of_rows(tmp_path / "whole.jsonl", kind, full_row, full_row))
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ConfigError) as caught:
        check_scoring(of_rows(path, kind, full_row, {**PROMPT, "number": 1}))
    (problem,) = caught.value.problems
    assert problem.subject == f"env.game.type={kind}"
    assert problem.text == f"needs the column limit, which rows of {path} lack; all have number, prompt"
    check_scoring(of_rows(path, kind, PROMPT, processor="tests.unit.preflight.test_needed_columns.of_rows"))
