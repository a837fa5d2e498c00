"""Settings of the training loop that do not fit together, one test for each kind of mistake."""

from __future__ import annotations

import pytest

from megatron_grpo.config.schema import Config, GRPOConfig
from megatron_grpo.preflight.load import compose_config

FUNCTIONS = ["env.addition.type=reward_functions", "env.addition.reward_funcs=[pkg.one,pkg.two]"]


def test_all_options_of_the_loop_go_together() -> None:
    config = compose_config(
        [
            "+exp=quickstart",
            "policy.train_global_batch_samples=64",
            "grpo.num_iterations=3",
            "grpo.use_dynamic_sampling=true",
            "grpo.batch_multiplier=1.5",
            "loss_fn.reference_policy_kl_penalty=0.1",
            "grpo.sync_ref_model=true",
            "grpo.early_stop.enabled=true",
            "grpo.early_stop.threshold=0.9",
        ]
    )
    assert config.optimizer_steps_per_step == 12
    assert config.decay_steps == 400 * 12
    assert config.prompts_per_generation_batch == 48


@pytest.mark.parametrize(("multiplier", "prompts"), [(1.15, 115), (1.16, 116), (2.3, 230), (1.005, 100), (1, 100)])
def test_prompts_of_a_generation_batch_are_counted_in_decimals(multiplier: float, prompts: int) -> None:
    """100 * 1.15 is 114.99999999999999 in binary."""
    grpo = GRPOConfig(num_prompts_per_step=100, batch_multiplier=multiplier, use_dynamic_sampling=True)
    assert Config(grpo=grpo).prompts_per_generation_batch == prompts


@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        (["env.addition.type=reward_functions", "env.addition.reward_funcs=[pkg.length]"], "val_reward"),
        (["env.addition.type=judge", "env.addition.options={model: m}"], "val_reward"),
        (["env.addition.type=judge", "env.addition.options={model: m, correct_from: 0.7}"], "val_accuracy"),
        ([*FUNCTIONS, "env.addition.correct_func=two"], "val_accuracy"),
        ([], "val_accuracy"),
    ],
)
def test_checkpoints_rank_by_reward_where_nothing_is_known_to_be_correct(overrides: list[str], metric: str) -> None:
    assert compose_config(["+exp=quickstart", *overrides]).ranked_checkpointing.metric_name == metric
