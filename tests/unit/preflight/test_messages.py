"""What is refused of a command line and what is remarked on, as the tables beside this file have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config.compose import ComposedConfig
from megatron_grpo.config.paths import TOKEN_VARIABLE
from megatron_grpo.preflight.load import compose_checked, compose_config
from megatron_grpo.preflight.remarks import find_remarks
from megatron_grpo.run.checkpoints import choose_ranking
from tests.support.message_table import MessageRow, read_table

FOLDER = Path(__file__).parent


def compose_row(row: MessageRow, base_overrides: list[str]) -> ComposedConfig:
    return compose_checked([*(base_overrides if row.base == "model" else row.base.split("  ")), *row.overrides])


@pytest.mark.parametrize("row", read_table(FOLDER / "refused.txt"), ids=str)
def test_mistakes_and_what_is_taken(
    row: MessageRow, base_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    row.check(compose_row(row, base_overrides).problems)


@pytest.mark.parametrize("row", read_table(FOLDER / "remarked.txt"), ids=str)
def test_settings_that_may_not_be_meant(row: MessageRow, base_overrides: list[str]) -> None:
    row.check(find_remarks(compose_row(row, base_overrides).require()))


@pytest.mark.parametrize(
    "recipe",
    [
        *("quickstart", "quickstart_ppo", "quickstart_async", "quickstart_distillation"),
        *("qwen3_8b_8gpu", "llama3_70b_slurm"),
    ],
)
def test_nothing_is_remarked_on_that_a_recipe_has(recipe: str) -> None:
    assert list(find_remarks(compose_config([f"+exp={recipe}"]))) == []


def test_reward_ranks_checkpoints_where_nothing_is_validated() -> None:
    off = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")
    ranked = choose_ranking(compose_config(["+exp=quickstart", *off, "checkpointing.higher_is_better=false"]))
    assert (ranked.metric_name, ranked.higher_is_better) == ("reward", True)
