"""Recipes compose and say what they lack on this machine; what is written from the schema is up to date."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from docs.configuration_page import format_page
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.keys import read_keys, read_sections
from megatron_grpo.config.overrides import RECIPES, list_config_groups
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config, load_config

ROOT = Path(__file__).parents[3]


def test_every_key_and_section_is_documented() -> None:
    assert [key.name for key in read_keys().values() if not key.doc] == []


def test_documented_defaults_are_those_of_the_schema() -> None:
    config: Any = Config()
    for name, key in read_keys().items():
        if "<" not in name:
            assert functools.reduce(getattr, name.split("."), config) == key.default, name
    assert [group.name for group in read_sections() if not group.doc] == []


def test_every_recipe_composes() -> None:
    for recipe in list_config_groups()[RECIPES]:
        assert compose_config([f"+exp={recipe}"]).name == recipe


@pytest.mark.parametrize("recipe", ["qwen3_8b_8gpu", "llama3_70b_slurm", "qwen3_1_7b_one_gpu"])
def test_without_gpus_the_first_line_says_so(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError) as caught:
        load_config([f"+exp={recipe}"])
    problem, *others = caught.value.problems
    assert problem.text.startswith("this machine has no CUDA GPU")
    assert {other.key for other in others} >= {"data.train_path", "data.val_path"}, "files of the recipe's user"


def test_the_message_is_aligned() -> None:
    problems = [Problem("a=1", "is wrong"), Problem("longer.key=2", "as well")]
    assert str(ConfigError(problems)).splitlines() == [
        "configuration has 2 problems:",
        "  a=1           is wrong",
        "  longer.key=2  as well",
    ]


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == format_page(), "run make docs"
