"""Three real steps with every preset and every option of rewards, advantages and loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron_grpo.config.overrides import config_groups
from tests.integration.runs import TrainingRun

SHORT = (
    "grpo.max_num_steps=3",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.enabled=false",
    "grpo.num_prompts_per_step=16",
)
CORRECTION = ("loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_ratio=2.0")
OPTIONS = {
    "kl_and_tis": (
        *CORRECTION,
        "loss_fn.truncated_importance_sampling_type=tis",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "loss_fn.reference_policy_kl_type=k1",
        "loss_fn.use_on_policy_kl_approximation=true",
        "loss_fn.kl_input_clamp_value=20",
        "loss_fn.kl_output_clamp_value=10",
        "loss_fn.ratio_clip_c=3",
        "grpo.num_iterations=2",
    ),
    "icepop_and_entropy": (
        *CORRECTION,
        "loss_fn.truncated_importance_sampling_type=icepop",
        "loss_fn.truncated_importance_sampling_ratio_min=0.5",
        "loss_fn.entropy_coef=0.01",
        "loss_fn.force_on_policy_ratio=true",
        "grpo.normalize_rewards_over=batch",
        "grpo.overlong_filtering=true",
        "policy.parallel.pipeline=1",
        "policy.parallel.tensor=2",
    ),
    "seq_mask_tis_and_imitation": (
        *CORRECTION,
        "loss_fn.truncated_importance_sampling_type=seq-mask-tis",
        "loss_fn.truncated_importance_sampling_ratio_min=0.5",
        "loss_fn.positive_example_nll_weight=0.1",
        "grpo.advantage_clip_low=-1",
        "grpo.advantage_clip_high=2",
        "grpo.reward_scaling.enabled=true",
        "grpo.reward_scaling.target_min=-1",
        "grpo.reward_shaping.enabled=true",
        "grpo.reward_shaping.stop_properly_penalty_coef=0.5",
    ),
    "gdpo": (
        "grpo.adv_estimator.name=gdpo",
        "env.addition.type=reward_functions",
        "env.addition.reward_funcs=[tests.integration.example_rewards.right,"
        "tests.integration.example_rewards.three_digits]",
        "env.addition.reward_weights=[1.0,0.2]",
        "env.addition.correct_func=right",
    ),
}


def three_steps(run: TrainingRun) -> list[dict[str, float]]:
    assert run.finish() == 0, run.log()
    rows = run.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0
        assert row["token_mult_prob_error_max"] < 1.01
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("variant", config_groups()["variant"])
def test_every_preset_trains(variant: str, tmp_path: Path) -> None:
    rows = three_steps(TrainingRun(tmp_path / variant, f"+variant={variant}", *SHORT))
    with_reference = variant in ("rloo", "reinforce_plus_plus")
    assert all(("kl_penalty" in row) == with_reference for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_trains(name: str, tmp_path: Path) -> None:
    rows = three_steps(TrainingRun(tmp_path / name, *SHORT, *OPTIONS[name]))
    expected = {
        "kl_and_tis": {"is_oob_ratio", "kl_penalty", "clip_fraction_dual"},
        "icepop_and_entropy": {"is_oob_ratio", "entropy"},
        "seq_mask_tis_and_imitation": {"is_oob_ratio", "positive_nll"},
        "gdpo": {"reward/right", "reward/three_digits"},
    }[name]
    for row in rows:
        assert expected <= row.keys()
        if name == "gdpo":
            assert row["accuracy"] == pytest.approx(row["reward/right"])
    if name == "icepop_and_entropy":
        assert rows[0]["entropy"] == pytest.approx(rows[0]["approx_entropy"], rel=0.2)
