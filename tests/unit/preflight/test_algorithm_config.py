"""Presets of the published variants, and what the keys of rewards, advantages and loss refuse."""

from __future__ import annotations

import pytest

from megatron_grpo.config.overrides import list_config_groups
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.preflight.load import compose_config

VARIANTS = ["cispo", "dapo", "dr_grpo", "gspo", "reinforce_plus_plus", "rloo", "sapo"]


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


def test_without_a_variant_the_loss_is_the_clipped_one() -> None:
    assert compose_config(["+exp=quickstart"]).loss_fn == LossConfig(reference_policy_kl_penalty=0.0)
