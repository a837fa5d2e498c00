"""Presets of the published variants, and what the keys of rewards, advantages and loss refuse."""

from __future__ import annotations

import pytest

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.overrides import list_config_groups
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.preflight.load import compose_config

VARIANTS = ["cispo", "dapo", "dr_grpo", "gspo", "reinforce_plus_plus", "rloo", "sapo"]
FUNCTIONS = ["env.addition.type=reward_functions", "env.addition.reward_funcs=[pkg.one,pkg.two]"]
UNRANKED = "checkpointing.keep_top_k=null"
"""By accuracy, which several functions do not know."""
TIS = ["loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_type=tis"]
ICEPOP = [TIS[0], "loss_fn.truncated_importance_sampling_type=icepop"]


def problems_of(*overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        compose_config(["+exp=quickstart", *overrides])
    return list(caught.value.problems)


def test_the_published_variants_are_presets() -> None:
    assert list_config_groups()["variant"] == VARIANTS


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


def test_rollouts_of_several_turns_may_exceed_the_limit_of_one() -> None:
    turns = ["grpo.max_rollout_turns=3", "+variant=dapo"]
    assert compose_config(["+exp=quickstart", *turns, "grpo.reward_shaping.max_response_length=9"])
    (problem,) = problems_of(*turns, "grpo.reward_shaping.max_response_length=16")
    assert "beyond generation.max_new_tokens=5 in all turns, 15 tokens" in problem.text


def test_an_agents_longest_rollout_has_to_be_told() -> None:
    agent = ["+variant=dapo", "generation.endpoint.enabled=true"]
    (problem,) = problems_of(*agent)
    assert problem.subject.startswith("grpo.reward_shaping.max_response_length=")
    assert compose_config(["+exp=quickstart", *agent, "grpo.reward_shaping.max_response_length=100"])


@pytest.mark.parametrize("length", ["abc", "null", "0"])
def test_what_follows_a_wrong_length_is_not_complained_about(length: str) -> None:
    """Neither of the default that stands in its place nor of what is computed from it."""
    (problem,) = problems_of("+variant=dapo", f"generation.max_new_tokens={length}")
    assert problem.subject == f"generation.max_new_tokens={length}"


def test_without_a_variant_the_loss_is_the_clipped_one() -> None:
    assert compose_config(["+exp=quickstart"]).loss_fn == LossConfig(reference_policy_kl_penalty=0.0)


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("loss_fn.ratio_clip_c=1", "float > 1 or null"),
        ("loss_fn.ratio_clip_min=1.1", "float >= 0 and <= 1"),
        ("loss_fn.reference_policy_kl_type=k4", "one of k1, k2, k3"),
        ("loss_fn.truncated_importance_sampling_type=mis", "one of tis, icepop, seq-mask-tis or null"),
        ("loss_fn.truncated_importance_sampling_ratio=0", "float > 0 or null"),
        ("loss_fn.sapo_temperature_pos=0", "float > 0"),
        ("loss_fn.entropy_coef=-1", "float >= 0"),
        ("loss_fn.positive_example_nll_weight=-0.1", "float >= 0"),
        ("loss_fn.kl_input_clamp_value=0", "float > 0 or null"),
        ("loss_fn.constant_normalizer_tokens=0", "int > 0 or null"),
        ("grpo.adv_estimator.name=gae", "one of grpo, reinforce_plus_plus, gdpo"),
        ("grpo.normalize_rewards_over=step", "one of group, batch"),
        ("grpo.advantage_clip_low=1", "float <= 0 or null"),
        ("grpo.advantage_clip_high=-1", "float >= 0 or null"),
        ("grpo.reward_shaping.stop_properly_penalty_coef=2", "float >= 0 and <= 1 or null"),
        ("grpo.reward_shaping.overlong_buffer_length=0", "int > 0 or null"),
    ],
)
def test_a_bad_value_is_one_message_with_key_value_and_range(override: str, allowed: str) -> None:
    (problem,) = problems_of(override)
    key, _, value = override.partition("=")
    assert problem.key == key
    assert problem.subject.endswith(value)
    assert problem.text == f"must be {allowed}"


@pytest.mark.parametrize(
    ("overrides", "subject", "text"),
    [
        (["loss_fn.use_cispo=true", "loss_fn.use_sapo=true"], "loss_fn.use_cispo=True", "excludes loss_fn.use_sapo"),
        (["loss_fn.use_sapo=true", "loss_fn.disable_ppo_ratio=true"], "loss_fn.use_sapo=True", "disable_ppo_ratio"),
        (["loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3"], "loss_fn.ratio_clip_c=3", "clipped surrogate"),
        (
            ["loss_fn.force_on_policy_ratio=true", "loss_fn.disable_ppo_ratio=true"],
            "loss_fn.force_on_policy_ratio=True",
            "no ratio left",
        ),
        (
            ["loss_fn.force_on_policy_ratio=true", "grpo.num_iterations=2"],
            "loss_fn.force_on_policy_ratio=True",
            "is correct for one optimizer step per sample; this configuration makes 2",
        ),
        (
            ["loss_fn.sequence_level_importance_ratios=true"],
            "loss_fn.sequence_level_importance_ratios=True",
            "needs loss_fn.token_level_loss=false",
        ),
        (["+variant=gspo", "loss_fn.use_sapo=true"], "loss_fn.sequence_level_importance_ratios=True", "its own ratio"),
        (
            ["+variant=gspo", "loss_fn.disable_ppo_ratio=true"],
            "loss_fn.sequence_level_importance_ratios=True",
            "has no ratio",
        ),
        (
            ["loss_fn.constant_normalizer_tokens=5", "loss_fn.token_level_loss=false"],
            "loss_fn.constant_normalizer_tokens=5",
            "divided by",
        ),
        (
            ["loss_fn.reference_policy_kl_type=k1", "loss_fn.reference_policy_kl_penalty=0.1"],
            "loss_fn.reference_policy_kl_type=k1",
            "expected gradient of 0",
        ),
        (["loss_fn.use_kl_in_reward=true", "grpo.normalize_rewards=false"], "loss_fn.use_kl_in_reward=True", "nothing"),
        (
            ["+variant=rloo", "loss_fn.use_on_policy_kl_approximation=true"],
            "loss_fn.use_on_policy_kl_approximation=True",
            "leaves none there",
        ),
        (["+variant=rloo", "grpo.normalize_rewards=true"], "loss_fn.use_kl_in_reward=True", "spread of its KL"),
        (
            ["loss_fn.truncated_importance_sampling_ratio=2"],
            "loss_fn.truncated_importance_sampling_ratio=2",
            "needs loss_fn.truncated_importance_sampling_type",
        ),
        (
            [TIS[1], "loss_fn.truncated_importance_sampling_ratio=2"],
            "loss_fn.truncated_importance_sampling_type=tis",
            "needs loss_fn.use_importance_sampling_correction=true",
        ),
        (TIS, "loss_fn.truncated_importance_sampling_type=tis", "the upper limit"),
        (
            [
                *TIS,
                "loss_fn.truncated_importance_sampling_ratio=2",
                "loss_fn.truncated_importance_sampling_ratio_min=0.5",
            ],
            "loss_fn.truncated_importance_sampling_ratio_min=0.5",
            "tis has no lower limit",
        ),
        (
            [*ICEPOP, "loss_fn.truncated_importance_sampling_ratio=2"],
            "loss_fn.truncated_importance_sampling_type=icepop",
            "the lower limit",
        ),
        (
            [
                *ICEPOP,
                "loss_fn.truncated_importance_sampling_ratio=2",
                "loss_fn.truncated_importance_sampling_ratio_min=3",
            ],
            "loss_fn.truncated_importance_sampling_ratio_min=3",
            "must be below 1",
        ),
        (
            [
                *ICEPOP,
                "loss_fn.truncated_importance_sampling_ratio=1",
                "loss_fn.truncated_importance_sampling_ratio_min=0.5",
            ],
            "loss_fn.truncated_importance_sampling_ratio=1",
            "must be above 1",
        ),
        (
            [
                "loss_fn.use_importance_sampling_correction=true",
                "loss_fn.truncated_importance_sampling_type=tis",
                "loss_fn.truncated_importance_sampling_ratio=0.5",
            ],
            "loss_fn.truncated_importance_sampling_ratio=0.5",
            "must be at least 1",
        ),
        (["grpo.adv_estimator.minus_baseline=true"], "grpo.adv_estimator.minus_baseline=True", "has a baseline anyway"),
        (
            ["+variant=reinforce_plus_plus", "grpo.normalize_rewards=false"],
            "grpo.normalize_rewards=False",
            "which is a normalisation",
        ),
        (
            ["+variant=reinforce_plus_plus", "grpo.normalize_rewards_over=batch"],
            "grpo.normalize_rewards_over=batch",
            "normalisation of its own",
        ),
        (["grpo.adv_estimator.name=gdpo"], "grpo.adv_estimator.name=gdpo", "env.addition does not give"),
        (
            [*FUNCTIONS, UNRANKED, "grpo.adv_estimator.name=gdpo", "grpo.reward_scaling.enabled=true"],
            "grpo.reward_scaling.enabled=True",
            "takes each by itself",
        ),
        (
            ["grpo.advantage_clip_low=0", "grpo.advantage_clip_high=0"],
            "grpo.advantage_clip_low=0",
            "leaves no advantage",
        ),
        (["grpo.reward_shaping.enabled=true"], "grpo.reward_shaping.enabled=True", "needs one of"),
        (
            ["+variant=dapo", "grpo.reward_shaping.stop_properly_penalty_coef=0"],
            "grpo.reward_shaping.enabled=True",
            "not both",
        ),
        (
            ["+variant=dapo", "grpo.reward_shaping.overlong_buffer_length=6"],
            "grpo.reward_shaping.overlong_buffer_length=6",
            "before the full penalty, 5 tokens",
        ),
        (
            ["+variant=dapo", "grpo.reward_shaping.max_response_length=6"],
            "grpo.reward_shaping.overlong_buffer_length=1",
            "beyond generation.max_new_tokens=5",
        ),
        (["env.addition.reward_funcs=[pkg.one]"], "env.addition.reward_funcs", "needs env.addition.type"),
        (["env.addition.reward_timeout_s=5"], "env.addition.reward_timeout_s", "needs env.addition.type"),
        (
            [*FUNCTIONS, UNRANKED, "+env.addition.options.digits=3"],
            "env.addition.options.digits",
            "env.addition.type=reward_functions has none; leave it out",
        ),
        (
            [*FUNCTIONS, UNRANKED, "env.addition.reward_model.gpus=1"],
            "env.addition.reward_model",
            "and there is none; leave it out, or name one",
        ),
        (["data.answer_key=null"], "data.answer_key=None", "env.addition of type addition compares with an answer"),
        ([FUNCTIONS[0]], "env.addition.reward_funcs", "is empty"),
        (
            [*FUNCTIONS, "env.addition.correct_func=three"],
            "env.addition.correct_func=three",
            "is none of the reward_funcs, which are called one, two",
        ),
        (
            [*FUNCTIONS, UNRANKED, "loss_fn.positive_example_nll_weight=0.1"],
            "loss_fn.positive_example_nll_weight=0.1",
            "give env.addition.correct_func",
        ),
        (
            [FUNCTIONS[0], "env.addition.reward_funcs=[one]"],
            "env.addition.reward_funcs=one",
            "must be written package.module.function",
        ),
        (
            [FUNCTIONS[0], UNRANKED, "env.addition.reward_funcs=[a.one,b.one]"],
            "env.addition.reward_funcs",
            "two functions called one",
        ),
        (
            [*FUNCTIONS, UNRANKED, "env.addition.reward_weights=[1.0]"],
            "env.addition.reward_weights",
            "one weight for each of the 2 reward_funcs, not 1",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_the_reason(
    overrides: list[str], subject: str, text: str
) -> None:
    (problem,) = problems_of(*overrides)
    assert problem.subject == subject
    assert text in problem.text


def test_reinforce_plus_plus_does_without_groups() -> None:
    one = ["grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=8"]
    assert compose_config(["+exp=quickstart", "+variant=reinforce_plus_plus", *one])
    (problem,) = problems_of("+variant=reinforce_plus_plus", "grpo.adv_estimator.minus_baseline=true", *one)
    assert problem.key == "grpo.num_generations_per_prompt"


def test_gdpo_needs_one_weight_for_a_function() -> None:
    other = "{type: reward_functions, reward_funcs: [pkg.one], reward_weights: [2.0]}"
    (problem,) = problems_of(*FUNCTIONS, "grpo.adv_estimator.name=gdpo", f"+env.other={other}")
    assert problem.subject == "env.other.reward_weights"
    assert "one the weight 2, another environment 1" in problem.text


def test_a_task_has_an_answer_and_a_chat_of_its_own() -> None:
    own = ["data.tasks.addition.answer_key=answer", "data.tasks.addition.apply_chat_template=true"]
    assert compose_config(["+exp=quickstart", "data.answer_key=null", "data.system_prompt=Add.", *own])


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model"])
def test_lengths_of_responses_count_where_responses_are_sampled(algorithm: str) -> None:
    """A sequence of rows may be shorter than a prompt and a response of another algorithm."""
    lengths = ("policy.max_total_sequence_length=64", "data.max_input_seq_length=64", "generation.max_new_tokens=1024")
    count = 1 if algorithm == "sft" else 2
    options = (f"algorithm={algorithm}", f"grpo.num_generations_per_prompt={count}", "data.answer_key=null")
    columns = ("data.response_key=answer",) if algorithm == "sft" else ()
    assert compose_config(["+exp=quickstart", *options, *columns, *lengths])
    assert any("do not fit" in problem.text for problem in problems_of(*lengths))
    if algorithm == "sft":
        sampled = (*options[:2], *columns, "sft.val_rewards=true", *lengths)
        assert any("do not fit" in problem.text for problem in problems_of(*sampled))


def test_reward_models_are_trained_whole_and_on_pairs() -> None:
    options = ("algorithm=reward_model", "grpo.num_generations_per_prompt=2", "data.answer_key=null")
    (problem,) = problems_of(*options, "policy.lora.rank=4")
    assert (problem.subject, "whose head is trained too" in problem.text) == ("policy.lora.rank=4", True)
    (problem,) = problems_of(*options[:1], *options[2:], "grpo.num_generations_per_prompt=1")
    assert "a row is a pair; use 2" in problem.text
