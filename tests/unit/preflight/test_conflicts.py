"""The tables of conflicting and unused settings name settings that exist."""

from __future__ import annotations

import re
from operator import attrgetter

import pytest

from megatron_grpo.config.keys import fill_placeholders, is_met, load_tables
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.rules import CONFLICTS, find_broken_rules, list_conflicts

SWITCHES = load_tables("switches.yaml")
CONDITIONS = [*(row for table in CONFLICTS.values() for row in table), *SWITCHES["needs"], *SWITCHES["unused"]]


@pytest.fixture(scope="module", params=["quickstart", "quickstart_ppo"])
def config(request: pytest.FixtureRequest) -> Config:
    return compose_config([f"+exp={request.param}"])


def test_every_condition_can_be_evaluated(config: Config) -> None:
    for row in CONDITIONS:
        for condition in row.split(" and "):
            is_met(config, condition)


def test_every_value_in_a_text_exists(config: Config) -> None:
    for table in CONFLICTS.values():
        for text in table.values():
            for key in re.findall(r"{([^}]*)}", fill_placeholders(config, text)):
                attrgetter(key)(config)


def test_a_conflict_names_the_first_key_with_its_value_and_fills_its_text(config: Config) -> None:
    config.generation.engine.dtype, config.refit.fp8_blocks, config.refit.mode = "bfloat16", True, "files"
    (problem,) = find_broken_rules(config, list_conflicts(config, "fp8_blocks"))
    assert problem.subject == "refit.fp8_blocks=True"
    assert "refit.mode=files sends tensors as vLLM's loader reads them; use reshard" in problem.text


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("loss_fn.use_sapo=false", True),
        ("loss_fn.use_sapo!=false", False),
        ("value_loss_fn.scale=1", True),
        ("policy.lora.rank above 0", False),
        ("policy.lora.rank below 1", True),
        ("no debug.rollouts_from", True),
        ("debug.rollouts_from", False),
        ("no generation.server.urls and loss_fn.use_sapo=true", False),
        ("debug.rollouts_from above 1", False),
        ("policy.lora.alpha at least 32", True),
        ("policy.lora.alpha at most 31", False),
        ("policy.optimizer.min_lr below policy.optimizer.lr", True),
        ("policy.optimizer.warmup_steps at least policy.optimizer.decay_steps", False),
        ("grpo.num_prompts_per_step equals ppo.num_prompts_per_step", True),
        ("policy.fp8.recipe=delayed|tensorwise", True),
        ("policy.fp8.recipe!=delayed|tensorwise", False),
    ],
)
def test_the_forms_of_a_condition(condition: str, holds: bool) -> None:
    assert is_met(Config(), condition) == holds
