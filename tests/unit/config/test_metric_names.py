"""Which metrics a step has is known before it: what ranks checkpoints is checked against that."""

from __future__ import annotations

import re

import pytest

from megatron_grpo.config.errors import ConfigError
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


@pytest.mark.parametrize("name", ["reward", "truncation_rate", "loss", "accuracy", "groups_mixed"])
def test_metrics_of_every_run_rank(name: str) -> None:
    assert compose_config([QUICKSTART, f"checkpointing.metric_name={name}"]).checkpointing.metric_name == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("val_acuracy", "is not a validation metric; these are: val_accuracy"),
        ("acuracy", "is not a metric of a step; did you mean accuracy?"),
        ("zzz", "is not a metric of a step; there is accuracy, "),
        ("kl_penalty", "is not a metric of this run: it needs loss_fn.reference_policy_kl_penalty above 0"),
        ("value_loss", "is not a metric of this run: it needs algorithm=ppo"),
        ("filtered_reward", "is not a metric of this run: it needs grpo.use_dynamic_sampling=true"),
        ("kl", "is reported as kl_penalty"),
        ("reward/mine", "is not a metric of a step"),
    ],
)
def test_a_metric_that_no_step_has_is_refused_before_the_run(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([QUICKSTART, f"checkpointing.metric_name={name}"])
    (problem,) = caught.value.problems
    assert problem.subject == f"checkpointing.metric_name={name}"
    assert text in problem.text


def test_a_metric_that_a_switch_brings() -> None:
    penalty = "loss_fn.reference_policy_kl_penalty=0.1"
    assert "kl_penalty" in list_step_metrics(compose_config([QUICKSTART, penalty]))
    assert "value_loss" in list_step_metrics(compose_config([PPO]))
    functions = ["env.addition.type=reward_functions", "env.addition.reward_funcs=[a.mine]"]
    config = compose_config([QUICKSTART, *functions, "checkpointing.metric_name=reward/mine"])
    assert list_optional_metrics(config) <= list_step_metrics(config)


def test_figures_of_environments_rank_by_their_whole_name() -> None:
    functions = ["env.addition.type=reward_functions", "env.addition.reward_funcs=[a.mine]"]
    for name in ("env/f1", "env/reward", "env/a/b"):
        compose_config([QUICKSTART, *functions, f"checkpointing.metric_name={name}", "checkpointing.keep_top_k=2"])
    for given, name, text in (
        (functions, "f1", "is not a metric of a step.*; a metric f1 of a reward function or environment is env/f1$"),
        (functions, "env/", "is not a metric of a step"),
        ([], "env/f1", "no environment of this run reports metrics"),
        (["env.addition.reward_funcs=[./model]", functions[0]], "env/f1", "no environment of this run reports metrics"),
    ):
        with pytest.raises(ConfigError, match=text):
            compose_config([QUICKSTART, *given, f"checkpointing.metric_name={name}"])
