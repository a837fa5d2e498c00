"""Which metrics a step has is known before it: what ranks checkpoints is checked against that."""

from __future__ import annotations

import re

from megatron_grpo.config.metric_names import list_optional_metrics, list_possible_metrics, list_step_metrics
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config
from tests.support.documented import PAGE, undocumented

QUICKSTART, PPO = "+exp=quickstart", "+exp=quickstart_ppo"


OF_ROWS = list_step_metrics(Config(algorithm="dpo")) | list_step_metrics(Config(algorithm="reward_model"))
ALL_STEP_METRICS = {*list_possible_metrics(Config()), *OF_ROWS}


def test_the_names_are_those_of_the_documented_page() -> None:
    """In both directions, so that a metric that is added to the page is added here too."""
    assert undocumented(ALL_STEP_METRICS) == set()
    of_steps = PAGE.read_text().partition("Validation has")[0]
    for cell in re.findall(r"^\| (`.*?) \|", of_steps, flags=re.MULTILINE):
        for name in re.findall(r"`([\w/]+)`", cell):
            known = [one for one in ALL_STEP_METRICS if one == name or (name.startswith("_") and one.endswith(name))]
            assert known or "NAME" in name, f"{name} is documented, and not in metric_names.py"


def test_a_metric_that_a_switch_brings() -> None:
    penalty = "loss_fn.reference_policy_kl_penalty=0.1"
    assert "kl_penalty" in list_step_metrics(compose_config([QUICKSTART, penalty]))
    assert "value_loss" in list_step_metrics(compose_config([PPO]))
    functions = ["env.addition.type=reward_functions", "env.addition.reward_funcs=[a.mine]"]
    config = compose_config([QUICKSTART, *functions, "checkpointing.metric_name=reward/mine"])
    assert list_optional_metrics(config) <= list_step_metrics(config)
