"""Settings of algorithms and loops: presets, defaults, what follows from them, and what a run with them is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from megatron_grpo.algorithms.distillation import find_teacher
from megatron_grpo.algorithms.grpo import async_grpo_train
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.metric_names import list_step_metrics
from megatron_grpo.config.overrides import list_config_groups
from megatron_grpo.config.schema import Config, GRPOConfig, LossConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.heads import VALUE
from megatron_grpo.models.tokenizer_files import explain_other_tokens
from megatron_grpo.preflight.distillation_checks import find_teacher_tokenizer_problems
from megatron_grpo.preflight.layout_checks import count_gpus
from megatron_grpo.preflight.load import compose_config, summarize_run
from megatron_grpo.preflight.remarks import find_remarks
from megatron_grpo.run.checkpoints import choose_ranking
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import make_run
from tests.support.grpo_run import SHAPE

VARIANTS = list_config_groups()["variant"]
PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_preset_is_described(variant: str) -> None:
    assert f"`{variant}`" in PAGE


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_composes_with_the_quickstart(variant: str) -> None:
    assert compose_config(["+exp=quickstart", f"+variant={variant}"]).name == "quickstart"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list_config_groups()["exp"])
def test_every_variant_composes_with_the_recipes(recipe: str) -> None:
    if compose_config([f"+exp={recipe}"]).algorithm == "grpo":
        for variant in VARIANTS:
            assert compose_config([f"+exp={recipe}", f"+variant={variant}"]).name == recipe


def test_a_variant_overrides_the_recipe_and_the_command_line_the_variant() -> None:
    config = compose_config(["+exp=quickstart", "+variant=dr_grpo", "generation.max_new_tokens=4"])
    assert config.loss_fn.constant_normalizer_tokens == 4
    config = compose_config(["+exp=quickstart", "+variant=rloo", "loss_fn.reference_policy_kl_penalty=0.5"])
    assert config.loss_fn.kl_in_reward == 0.5
    assert config.loss_fn.kl_in_loss == 0.0


def test_the_overlong_buffer_of_dapo_follows_the_longest_response() -> None:
    for recipe in ("quickstart", "qwen3_8b_8gpu"):
        config = compose_config([f"+exp={recipe}", "+variant=dapo"])
        assert config.grpo.reward_shaping.overlong_buffer_length == config.generation.max_new_tokens // 5 >= 1


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        ([], 5),
        (["grpo.max_rollout_turns=3"], 15),
        (["grpo.max_rollout_turns=9", "policy.max_total_sequence_length=32"], 32),
    ],
)
def test_the_penalty_of_dapo_is_full_for_the_longest_rollout(overrides: list[str], longest: int) -> None:
    """The tokens of all turns count, so the limit of one turn would punish rollouts that are not long."""
    config = compose_config(["+exp=quickstart", "+variant=dapo", *overrides])
    assert config.most_sampled_tokens == longest


def test_without_a_variant_the_loss_is_the_clipped_one() -> None:
    assert compose_config(["+exp=quickstart"]).loss_fn == LossConfig(reference_policy_kl_penalty=0.0)


def test_the_recipe_and_the_algorithm() -> None:
    names = ["name=quickstart_async", "run_dir=run"]
    config = compose_config(["+exp=quickstart_async", *names])
    assert config == compose_config(["+exp=quickstart", "algorithm=async_grpo", *names])
    assert config.algorithm == "grpo"
    assert config.grpo.async_grpo.enabled
    assert config.loss_fn.use_importance_sampling_correction
    assert list(find_remarks(config)) == []
    assert "quickstart_async, asynchronous GRPO, up to 400 steps" in summarize_run(config, None)
    assert "trajectory_age" in list_step_metrics(config)
    assert "trajectory_age" not in list_step_metrics(compose_config(["+exp=quickstart"]))


def test_a_run_that_was_set_up_to_sample_in_turn_is_not_trained_asynchronously(tmp_path: Path) -> None:
    config = compose_config(["+exp=quickstart"])
    run = make_run(config, tmp_path, FakeRollouts(), SHAPE, [])
    with pytest.raises(ValueError, match=r"set it up with grpo\.async_grpo\.enabled=true"):
        async_grpo_train(run)


def test_oversampling_has_metrics_of_its_own() -> None:
    config = compose_config(["+exp=quickstart_async", "grpo.async_grpo.oversampling_factor=1.5"])
    assert list(find_remarks(config)) == []
    assert "oversampling_resumed" in list_step_metrics(config)
    assert "oversampling_resumed" not in list_step_metrics(compose_config(["+exp=quickstart_async"]))


PPO = "+exp=quickstart_ppo"


def problems_of(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    return {problem.subject: problem.text for problem in caught.value.problems}


def test_the_value_model_is_as_the_policy_where_nothing_else_is_said() -> None:
    value = compose_config([PPO, "value.parallel.tensor=2"]).value_model
    assert value is not None
    assert value.model.path.endswith("model")
    assert (value.precision, value.microbatch_tokens, value.parallel.tensor) == ("float32", 1024, 2)
    assert compose_config(["+exp=quickstart"]).value_model is None


def test_a_value_model_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    config = Qwen3Config(vocab_size=16, max_position_embeddings=8, num_attention_heads=4, num_key_value_heads=2)
    config.architectures = ["Qwen3ForSequenceClassification"]
    config.num_labels = 1
    config.save_pretrained(tmp_path)
    problems = problems_of(PPO, f"value.model.path={tmp_path}")
    assert "has 8 positions, fewer than policy.max_total_sequence_length" in problems[f"value.model.path={tmp_path}"]


def test_schedules_count_the_optimizer_steps_that_there_are() -> None:
    """400 steps of 2 epochs over 256 samples: 4 minibatches of the value model, the policy 10 steps late."""
    config = compose_config(
        [PPO, "ppo.ppo_epochs=2", "ppo.policy_training_start_step=10", "value.train_global_batch_samples=64"]
    )
    assert config.decay_steps == 390 * 2
    assert config.value_decay_steps == 400 * 2 * 4


def test_reward_models_are_read_only_where_they_are_asked_for(tmp_path: Path) -> None:
    for labels in (1, 3):
        folder = tmp_path / str(labels)
        Qwen3Config(architectures=["Qwen3ForSequenceClassification"], num_labels=labels).save_pretrained(folder)
    assert read_model_shape(tmp_path / "1", reward_models=True).head == VALUE
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification is not supported"):
        read_model_shape(tmp_path / "1")
    with pytest.raises(ValueError, match="with 3 labels is a classifier"):
        read_model_shape(tmp_path / "3", reward_models=True)


@pytest.mark.parametrize(
    ("recipe", "overrides", "loaded"),
    [
        (PPO, ["ppo.skip_reference_policy_logprobs_calculation=false"], True),
        (PPO, ["ppo.skip_reference_policy_logprobs_calculation=true"], False),
        ("+exp=quickstart", [], False),
        ("+exp=quickstart", ["loss_fn.reference_policy_kl_penalty=0.1"], True),
    ],
)
def test_only_ppo_loads_a_reference_without_a_penalty(recipe: str, overrides: list[str], loaded: bool) -> None:
    assert compose_config([recipe, *overrides]).uses_reference == loaded


def test_the_kl_may_lower_the_reward_with_ppo() -> None:
    """What keeps GRPO from it, the standard deviation of a group, PPO does not have."""
    kl = ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1"]
    config = compose_config([PPO, *kl, "ppo.skip_reference_policy_logprobs_calculation=false"])
    assert config.loss_fn.kl_in_reward == 0.1
    assert config.loss_fn.kl_in_loss == 0


RECIPE = "+exp=quickstart_distillation"


def test_the_loop_is_that_of_grpo() -> None:
    config = compose_config([RECIPE, "grpo.max_num_steps=7", "env.addition.type=unscored"])
    assert config.loop.max_num_steps == 7
    assert not config.uses_rewards
    assert not config.uses_reference
    assert list(config.named_teachers) == ["teacher"]


def test_a_task_decides_its_teacher() -> None:
    overrides = ["+env.games.type=countdown", "+teachers.games.model.path=/games", "+teachers.games.parallel.tensor=2"]
    config = compose_config([RECIPE, *overrides, "env.games.type=unscored"])
    assert list(config.named_teachers) == ["teacher", "teachers.games"]
    assert [find_teacher(config, task) for task in ("addition", "games")] == ["teacher", "teachers.games"]
    assert config.teacher_models["teachers.games"].model.path == "/games"
    gpus = count_gpus(config)
    assert {key: gpus[key] for key in ("teacher.parallel", "teachers.games.parallel")} == {
        "teacher.parallel": 1,
        "teachers.games.parallel": 2,
    }


def write_tokens(folder: Path, tokens: dict[str, int]) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    return folder


def test_another_tokenizer_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    policy = write_tokens(tmp_path / "policy", {"a": 0, "b": 1})
    assert explain_other_tokens(policy, write_tokens(tmp_path / "same", {"b": 1, "a": 0})) is None
    swapped = write_tokens(tmp_path / "swapped", {"a": 1, "b": 0})
    assert explain_other_tokens(policy, swapped) == (
        "has another tokenizer: its token 0 is 'b', that of the policy 'a'"
    )
    shorter = write_tokens(tmp_path / "shorter", {"a": 0})
    assert explain_other_tokens(policy, shorter) == (
        "has another tokenizer: its token 1 is missing, that of the policy 'b'"
    )
    (tmp_path / "none").mkdir()
    assert "cannot be compared" in (explain_other_tokens(policy, tmp_path / "none") or "")
    config = compose_config([RECIPE, f"policy.model.path={policy}", f"teacher.model.path={swapped}"])
    (problem,) = find_teacher_tokenizer_problems(config)
    assert problem.subject == f"teacher.model.path={swapped}"


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
    assert choose_ranking(compose_config(["+exp=quickstart", *overrides])).metric_name == metric
