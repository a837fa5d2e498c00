"""A schedule of the learning rate that the rows end is remarked on before a run."""

from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.schema import OptimizerConfig
from megatron_grpo.data.load_prompts import load_prompt_data
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.trainer.optimizer import Schedule
from tests.unit.data.test_prompt_remarks import base_model

PER_STEP = "grpo.num_prompts_per_step=10"  # of 40 rows
COSINE, RATIO = "policy.optimizer.decay_style=cosine", "policy.optimizer.warmup_ratio=0.05"


class Group:
    """An optimizer with one group of parameters, as schedules need it."""

    def __init__(self, lr: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": lr}]


@pytest.mark.parametrize("setting", [COSINE, RATIO, "policy.optimizer.decay_style=warmup_stable_decay"])
def test_a_schedule_that_the_rows_end_is_remarked_on(base_overrides: list[str], model: Path, setting: str) -> None:
    base_model(model)
    overrides = [*base_overrides, PER_STEP, setting, "data.apply_chat_template=false"]
    (note,) = load_prompt_data(compose_config(overrides), model).notes
    assert note.startswith("policy.optimizer: the schedule of the learning rate has grpo.max_num_steps=1000 steps")
    assert "used up after 4 (grpo.max_num_epochs=1)" in note
    (note,) = load_prompt_data(compose_config([*overrides, "grpo.max_num_epochs=3"]), model).notes
    assert "used up after 12 (grpo.max_num_epochs=3)" in note


@pytest.mark.parametrize(
    "settings",
    [
        ["policy.optimizer.warmup_steps=2"],  # constant afterwards
        ["policy.optimizer.decay_style=inverse_sqrt"],
        [COSINE, "policy.optimizer.decay_steps=4"],
        [COSINE, "grpo.max_num_steps=4"],
        [COSINE, "grpo.max_num_epochs=250"],
    ],
)
def test_a_schedule_that_ends_in_time_is_not(base_overrides: list[str], model: Path, settings: list[str]) -> None:
    base_model(model)
    overrides = [*base_overrides, PER_STEP, "data.apply_chat_template=false", *settings]
    assert load_prompt_data(compose_config(overrides), model).notes == []


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay"])
@pytest.mark.parametrize("warmup", [{"warmup_ratio": 0.25}, {"warmup_steps": 2}])
def test_settings_depend_on_the_steps_as_megatrons_schedule_does(style: Any, warmup: dict[str, Any]) -> None:
    """Learning rates of schedules with 20 and 40 steps, at every step of the shorter one."""
    settings = OptimizerConfig(lr=1.0, decay_style=style, **warmup)

    def list_rates(steps: int) -> list[float]:
        schedule, rates = Schedule(Group(1.0), settings, steps), []
        for _ in range(20):
            schedule.step(1)
            rates.append(schedule.get_lr({}))
        return rates

    assert settings.depends_on_steps == (list_rates(20) != list_rates(40))
