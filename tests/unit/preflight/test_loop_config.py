"""Settings of the training loop that do not fit together, one test for each kind of mistake."""

from __future__ import annotations

import pytest

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.schema import Config, GRPOConfig
from megatron_grpo.preflight.load import compose_config

FUNCTIONS = ["env.addition.type=reward_functions", "env.addition.reward_funcs=[pkg.one,pkg.two]"]


@pytest.mark.parametrize(
    ("overrides", "subject", "text"),
    [
        (["policy.train_global_batch_samples=48"], "policy.train_global_batch_samples=48", "divide the 256 samples"),
        (
            ["policy.train_global_batch_samples=2", "policy.parallel.data=4", "policy.parallel.pipeline=1"],
            "policy.train_global_batch_samples=2",
            "policy.parallel.data=4",
        ),
        (["grpo.batch_multiplier=2"], "grpo.batch_multiplier=2", "needs grpo.use_dynamic_sampling=true"),
        (
            [
                "grpo.use_dynamic_sampling=true",
                "grpo.num_generations_per_prompt=1",
                "grpo.adv_estimator.name=reinforce_plus_plus",
            ],
            "grpo.use_dynamic_sampling=True",
            "needs grpo.num_generations_per_prompt of 2 or more",
        ),
        (
            ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.target_max=0"],
            "grpo.reward_scaling.target_min=0",
            "makes all rewards the same",
        ),
        (["grpo.batch_multiplier=0.5"], "grpo.batch_multiplier=0.5", "float >= 1"),
        (
            ["grpo.sync_ref_model=true"],
            "grpo.sync_ref_model=True",
            "moves a reference policy that the loss does not use",
        ),
        (["grpo.ref_model_mixup_alpha=0"], "grpo.ref_model_mixup_alpha=0", "float > 0 and <= 1"),
        (["grpo.seq_logprob_error_threshold=1"], "grpo.seq_logprob_error_threshold=1", "float > 1"),
        (["grpo.early_stop.enabled=true"], "grpo.early_stop.enabled=True", "has no criterion"),
        (
            ["grpo.early_stop.enabled=true", "grpo.early_stop.patience=1", "grpo.early_stop.metric_name=reward"],
            "grpo.early_stop.metric_name=reward",
            "these are: val_accuracy, val_reward",
        ),
        (
            [*FUNCTIONS, "checkpointing=none", "grpo.early_stop.enabled=true", "grpo.early_stop.patience=1"],
            "grpo.early_stop.metric_name=val_accuracy",
            "name one in env.addition.correct_func, or take val_reward",
        ),
        (
            [*FUNCTIONS, "checkpointing.metric_name=val_set_acuracy"],
            "checkpointing.metric_name=val_set_acuracy",
            "is not a validation metric",
        ),
        (["generation.temperature=0.003"], "generation.temperature=0.003", "must be 0 (greedy) or"),
        (["grpo.val_temperature=1e-7"], "grpo.val_temperature=1e-07", "must be 0 (greedy) or"),
        (
            ["grpo.early_stop.enabled=true", "grpo.early_stop.patience=1", "grpo.val_period=0"],
            "grpo.early_stop.enabled=True",
            "needs data.val_path and grpo.val_period",
        ),
    ],
)
def test_what_does_not_fit_together(overrides: list[str], subject: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["+exp=quickstart", *overrides])
    (problem,) = caught.value.problems
    assert problem.subject == subject
    assert text in problem.text


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
