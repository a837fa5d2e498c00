"""Settings that change nothing are named, with the switch that they need."""

from __future__ import annotations

import pytest

from megatron_grpo.config.overrides import list_config_groups
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.remarks import find_unused_settings

MINIBATCHES = "policy.train_global_batch_samples=64"


def unused(*overrides: str) -> dict[str, str]:
    return {problem.subject: problem.text for problem in find_unused_settings(compose_config(list(overrides)))}


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_ppo"])
def test_nothing_in_the_recipes_is_unused(recipe: str) -> None:
    assert unused(f"+exp={recipe}") == {}


@pytest.mark.parametrize("variant", list_config_groups()["variant"])
def test_with_minibatches_nothing_in_a_preset_is_unused(variant: str) -> None:
    assert unused("+exp=quickstart", f"+variant={variant}", MINIBATCHES) == {}


@pytest.mark.parametrize(
    ("variant", "subject"),
    [
        ("cispo", "loss_fn.use_cispo=True"),
        ("sapo", "loss_fn.use_sapo=True"),
        ("gspo", "loss_fn.sequence_level_importance_ratios=True"),
        ("dapo", "loss_fn.ratio_clip_max=0.28"),
    ],
)
def test_a_variant_of_the_ratio_does_nothing_where_all_ratios_are_1(variant: str, subject: str) -> None:
    found = unused("+exp=quickstart", f"+variant={variant}")
    assert "all ratios are 1" in found[subject]
    assert "grpo.num_iterations above 1" in found[subject]
    assert subject not in unused("+exp=quickstart", f"+variant={variant}", "grpo.num_iterations=2")


@pytest.mark.parametrize(
    ("override", "switch"),
    [
        ("loss_fn.sapo_temperature_neg=2", "loss_fn.use_sapo=true"),
        ("loss_fn.reference_policy_kl_type=k2", "loss_fn.reference_policy_kl_penalty above 0"),
        ("loss_fn.kl_input_clamp_value=20.0", "loss_fn.reference_policy_kl_penalty above 0"),
        ("grpo.ref_model_sync_steps=5", "grpo.sync_ref_model=true"),
        ("grpo.dynamic_sampling_max_gen_batches=3", "grpo.use_dynamic_sampling=true"),
        ("grpo.reward_scaling.target_min=-1.0", "grpo.reward_scaling.enabled=true"),
        ("grpo.reward_shaping.overlong_buffer_length=2", "grpo.reward_shaping.enabled=true"),
        ("grpo.early_stop.threshold=0.9", "grpo.early_stop.enabled=true"),
        ("reference.offload=true", None),
        ("data.shuffle_buffer=50", "data.streaming=true"),
        ("data.tools=tools.json", "data.apply_chat_template=true"),
        ("data.chat_template_kwargs.enable_thinking=false", "data.apply_chat_template=true"),
        ("logger.rollouts_sample=8", "logger.rollouts=sample"),
        ("logger.num_completions_to_print=2", "logger.log_completions=true"),
        ("logger.wandb.project=mine", "logger.wandb.enabled=true"),
        ("logger.mlflow.experiment=mine", "logger.mlflow.enabled=true"),
    ],
)
def test_a_setting_whose_switch_is_off(override: str, switch: str | None) -> None:
    ((subject, text),) = unused("+exp=quickstart", MINIBATCHES, override).items()
    assert subject.partition("=")[0] == override.partition("=")[0]
    assert text == (f"needs {switch}" if switch else "there is no reference policy")


def test_settings_of_rows_that_are_not_read() -> None:
    both = ("data.train_split=test", "data.subset=main")
    sets = ("policy.model.path=nowhere", "data.train_sets.one.path=a.jsonl")
    assert unused("+exp=quickstart", *both) == {}
    assert list(unused(*sets, "data.val_path=b.jsonl", *both)) == ["data.train_split=test"], "validation has the subset"
    assert set(unused(*sets, "data.val_sets.one.path=b.jsonl", *both)) == set(both)


def test_settings_of_a_validation_that_never_is() -> None:
    found = unused("+exp=quickstart", "data.val_path=null", "data.val_split=train", "checkpointing.keep_top_k=null")
    assert found.pop("data.val_split=train") == "needs data.val_path"
    assert set(found) == {"grpo.val_period=50", "grpo.val_batch_size=512", "grpo.max_val_samples=512"}
    assert set(found.values()) == {"needs data.val_path or data.val_sets"}


def test_chunks_are_of_the_chunked_kernel() -> None:
    size = "policy.logprob_chunk_size=64"
    of_gpus = ["+exp=qwen3_8b_8gpu", "data.train_path=/nowhere"]
    assert size not in unused("+exp=quickstart", size)
    assert size not in unused(*of_gpus, size, "policy.logprob_kernel=chunked")
    for kernel in ("auto", "fused"):
        found = unused(*of_gpus, size, f"policy.logprob_kernel={kernel}")
        assert found[size] == "is for policy.logprob_kernel=chunked"


def test_reinforce_is_what_ratios_of_1_are_anyway() -> None:
    subject = "loss_fn.disable_ppo_ratio=True"
    assert "give more" not in unused("+exp=quickstart", "+variant=rloo")[subject]
    assert subject not in unused("+exp=quickstart", "+variant=rloo", "grpo.num_iterations=2")


def test_early_stopping_that_never_decides() -> None:
    on = ("+exp=quickstart", "grpo.early_stop.enabled=true", "grpo.val_period=400")
    subject = "grpo.early_stop.enabled=True"
    assert subject in unused(*on, "grpo.early_stop.patience=1")
    assert unused(*on, "grpo.early_stop.threshold=0.9") == {}
    assert subject in unused(*on, "grpo.early_stop.threshold=0.9", "grpo.val_at_start=false")


def test_a_multiplier_that_adds_no_prompt() -> None:
    dynamic = ("+exp=quickstart", "grpo.use_dynamic_sampling=true", "grpo.num_prompts_per_step=32")
    assert "adds no whole prompt" in unused(*dynamic, "grpo.batch_multiplier=1.02")["grpo.batch_multiplier=1.02"]
    assert unused(*dynamic, "grpo.batch_multiplier=1.25") == {}


def test_a_forced_ratio_needs_another_one_to_replace() -> None:
    forced = "loss_fn.force_on_policy_ratio=true"
    assert "loss_fn.force_on_policy_ratio=True" in unused("+exp=quickstart", forced)
    assert unused("+exp=quickstart", forced, "grpo.seq_logprob_error_threshold=1.5") == {}


@pytest.mark.parametrize(
    ("overrides", "subject"),
    [
        (["policy.optimizer.decay_style=constant", "policy.optimizer.decay_steps=5"], "policy.optimizer.decay_steps=5"),
        (["checkpointing.enabled=false", "checkpointing.keep_top_k=7"], "checkpointing.keep_top_k=7"),
        (
            ["grpo.early_stop.enabled=true", "grpo.early_stop.threshold=1", "grpo.early_stop.min_delta=0.5"],
            "grpo.early_stop.min_delta=0.5",
        ),
        (
            ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.stop_properly_penalty_coef=1"],
            "grpo.reward_shaping.stop_properly_penalty_coef=1.0",
        ),
    ],
)
def test_more_settings_that_need_another(overrides: list[str], subject: str) -> None:
    assert subject in unused("+exp=quickstart", *overrides)


def test_a_switch_of_another_kind() -> None:
    on = ("+exp=quickstart", MINIBATCHES)
    assert "loss_fn.ratio_clip_max=0.3" in unused(*on, "loss_fn.use_sapo=true", "loss_fn.ratio_clip_max=0.3")
    assert "loss_fn.ratio_clip_max=0.3" in unused(*on, "loss_fn.disable_ppo_ratio=true", "loss_fn.ratio_clip_max=0.3")
    batch = "grpo.normalize_rewards_over=batch"
    assert batch in unused(*on, batch, "grpo.normalize_rewards=false")
    assert batch not in unused(*on, batch)
    penalty = "grpo.reward_shaping.overlong_buffer_penalty=0.5"
    shaping = ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.stop_properly_penalty_coef=0.5")
    assert unused(*on, *shaping, penalty) == {penalty: "needs grpo.reward_shaping.overlong_buffer_length"}


def test_a_responses_ratio_also_weighs_the_sampling_correction() -> None:
    gspo = ("+exp=quickstart", "+variant=gspo")
    assert "loss_fn.sequence_level_importance_ratios=True" in unused(*gspo)
    correction = "loss_fn.use_importance_sampling_correction=true"
    assert "loss_fn.sequence_level_importance_ratios=True" not in unused(*gspo, correction)


def test_a_reference_that_never_moves() -> None:
    sync = ("grpo.sync_ref_model=true", "loss_fn.reference_policy_kl_penalty=0.1")
    found = unused("+exp=quickstart", *sync)
    assert found == {"grpo.sync_ref_model=True": "needs grpo.ref_model_sync_steps below grpo.max_num_steps"}
    assert "grpo.sync_ref_model=True" in unused("+exp=quickstart", *sync, "grpo.ref_model_sync_steps=400")
    assert unused("+exp=quickstart", *sync, "grpo.ref_model_sync_steps=100") == {}


def test_a_baseline_that_the_estimator_does_not_read() -> None:
    baseline = "grpo.use_leave_one_out_baseline=false"
    gdpo = ("env.addition.type=reward_functions", "env.addition.reward_funcs=[pkg.one]", "grpo.adv_estimator.name=gdpo")
    for estimator in (("grpo.adv_estimator.name=reinforce_plus_plus",), gdpo):
        assert "grpo.use_leave_one_out_baseline=False" in unused("+exp=quickstart", *estimator, baseline)
    assert unused("+exp=quickstart", baseline) == {}


def test_settings_of_the_value_model() -> None:
    clip = "value_loss_fn.value_clip=0.5"
    assert "one optimizer step" in unused("+exp=quickstart_ppo", clip)[clip]
    assert unused("+exp=quickstart_ppo", clip, "value.train_global_batch_samples=64") == {}
    lam = "ppo.adv_estimator.gae_lambda=0.9"
    assert unused("+exp=quickstart_ppo", lam) == {}
    assert lam in unused("+exp=quickstart_ppo", lam, "ppo.adv_estimator.gae_lambda_policy=0.0")
    assert lam in unused("+exp=quickstart_ppo", lam, "ppo.adv_estimator.length_adaptive_alpha=0.5")


def test_ppo_has_names_of_its_own() -> None:
    found = unused("+exp=quickstart_ppo", "loss_fn.ratio_clip_max=0.3", "ppo.ref_model_sync_steps=5")
    assert found["ppo.ref_model_sync_steps=5"] == "needs ppo.sync_ref_model=true"
    assert "ppo.ppo_epochs above 1" in found["loss_fn.ratio_clip_max=0.3"]
