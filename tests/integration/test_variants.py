"""Short runs of many options: losses, advantages, and an engine that computes something else."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForTokenClassification

from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.config.overrides import list_config_groups
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.prepare.models import prepare
from tests.integration.preset_steps import ON_RATIOS, STEPS
from tests.integration.runs import TrainingRun, without_timing
from tests.integration.whole_runs import complete, read_options

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

GROUPS = read_options("variants")

SHORT = GROUPS["short"]
ALONE = ("policy.parallel.pipeline=1", "generation.parallel.pipeline=1")
"""One rank and one process of an engine: the time goes into starting them."""
CORRECTION = ("loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_ratio=2.0")
OPTIONS = {
    "kl_and_tis": (*CORRECTION, *GROUPS["kl_and_tis"]),
    "icepop_and_entropy": (*CORRECTION, *GROUPS["icepop_and_entropy"]),
    "seq_mask_tis_and_imitation": (*CORRECTION, *GROUPS["seq_mask_tis_and_imitation"]),
    "gspo_corrected": (
        *CORRECTION,
        "+variant=gspo",
        "loss_fn.truncated_importance_sampling_type=tis",
        "policy.train_global_batch_samples=64",
    ),
    "minus_baseline_and_k2": (
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "grpo.adv_estimator.minus_baseline=true",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "loss_fn.reference_policy_kl_type=k2",
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


PPO_SHORT = (*(key.replace("grpo.", "ppo.") for key in SHORT), *ALONE, "ppo.policy_training_start_step=0")
PPO_OPTIONS = {
    "raw_reward_and_kl_in_reward": GROUPS["raw_reward_and_kl_in_reward"],
    "decoupled_lambdas": GROUPS["decoupled_lambdas"],
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


@pytest.fixture(scope="module")
def preset_metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """Metrics of two steps by preset: one run trains them all, on the same ranks and engine."""
    folder = tmp_path_factory.mktemp("presets")
    command = [sys.executable, "-m", "tests.integration.preset_steps", str(folder)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900.0, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    metrics: dict[str, list[dict[str, float]]] = json.loads((folder / "metrics.json").read_text())
    return metrics


@pytest.mark.parametrize("variant", list_config_groups()["variant"])
def test_every_preset_trains(variant: str, preset_metrics: dict[str, list[dict[str, float]]]) -> None:
    rows, with_reference = preset_metrics[variant], variant in ("rloo", "reinforce_plus_plus")
    assert len(rows) == STEPS
    for row in rows:
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0
        assert row["token_mult_prob_error_max"] < 1.01
        assert ("kl_penalty" in row) == with_reference
        clipped = row["clip_fraction_low"] + row["clip_fraction_high"]
        if variant in ON_RATIOS:
            assert row["probs_ratio_max"] > 1, "else the variants are all the same"
        if variant in ("gspo", "luspo"):
            assert clipped > 0.05, "its limits are below 1e-3"
        if variant == "cispo":
            assert row["clip_fraction_low"] == 0, "it has no lower limit"
        if variant == "sapo":
            assert clipped == 0
            assert row["probs_ratio_clamped"] == row["probs_ratio"]
        if variant == "high_entropy":
            assert row["is_oob_ratio"] == pytest.approx(0.8, abs=0.1), "a fifth of the tokens is learnt"


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_trains(name: str, tmp_path: Path) -> None:
    rows = three_steps(TrainingRun(tmp_path / name, *SHORT, *ALONE, *OPTIONS[name]))
    expected = {
        "kl_and_tis": {"is_oob_ratio", "kl_penalty"},
        "icepop_and_entropy": {"is_oob_ratio", "entropy"},
        "seq_mask_tis_and_imitation": {"is_oob_ratio", "positive_nll"},
        "gspo_corrected": {"is_oob_ratio"},
        "minus_baseline_and_k2": {"kl_penalty"},
        "gdpo": {"reward/right", "reward/three_digits"},
    }[name]
    for row in rows:
        assert expected <= row.keys()
        if name == "gdpo":
            assert row["accuracy"] == pytest.approx(row["reward/right"])
    if name == "icepop_and_entropy":
        assert rows[0]["entropy"] == pytest.approx(rows[0]["approx_entropy"], rel=0.2)


@pytest.mark.parametrize("name", PPO_OPTIONS)
def test_every_option_of_ppo_trains(name: str, tmp_path: Path) -> None:
    rows = three_steps(TrainingRun(tmp_path / name, *PPO_SHORT, *PPO_OPTIONS[name], recipe="quickstart_ppo"))
    assert all(("kl_penalty" in row) == (name == "raw_reward_and_kl_in_reward") for row in rows)
    clipped = [row["value_clip_fraction"] for row in rows]
    assert max(clipped) > 0 if name == "decoupled_lambdas" else max(clipped) == 0
    assert all(row["value_grad_norm"] > 0 for row in rows)
    assert (rows[0]["value_mean"], rows[0]["explained_variance"]) == (0, pytest.approx(0, abs=1e-6)), (
        "it starts at zero"
    )
    assert rows[1]["value_mean"] != 0


def test_a_reward_model_is_what_the_value_model_starts_from(tmp_path: Path) -> None:
    """Its score is what the value model says at the first step. The lambda of the policy follows the length."""
    config = compose_config(["+exp=quickstart_ppo"])
    prepare("addition", config.prepare.folder)
    reward_model = Qwen3ForTokenClassification.from_pretrained(config.policy.model.path, num_labels=1)
    with torch.no_grad():
        reward_model.score.weight.zero_()
        reward_model.score.bias.fill_(0.25)
    reward_model.save_pretrained(tmp_path / "reward_model")
    options = (f"value.model.path={tmp_path / 'reward_model'}", "ppo.adv_estimator.length_adaptive_alpha=0.5")
    rows = three_steps(TrainingRun(tmp_path / "run", *PPO_SHORT, *options, recipe="quickstart_ppo"))
    assert rows[0]["value_mean"] == 0.25
    assert rows[1]["value_mean"] != 0.25


FOUR_STEPS = (
    "grpo.max_num_steps=4",
    "grpo.num_prompts_per_step=16",
    "data.val_path=null",
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=null",
)
DEFECT = ("generation.engine_args.hf_overrides={rms_norm_eps: 1.0}", "refit.canary=false")
"""An engine with another epsilon, which no comparison of weights can find."""


def test_a_step_past_the_limit_is_not_learnt_from_and_a_mended_run_goes_on(tmp_path: Path) -> None:
    straight = complete(TrainingRun(tmp_path / "straight", *FOUR_STEPS))
    resume = f"checkpointing.resume={straight.run_dir}/checkpoints/step_2"
    broken = TrainingRun(tmp_path / "broken", *FOUR_STEPS, *DEFECT, resume, "refit.prob_error_limit=1.001")
    assert broken.finish() == 1, broken.log()
    (row,) = broken.metrics()
    assert (row["step"], row["optimizer_steps"], row["token_mult_prob_error_off"]) == (3, 0, 1)
    assert row["token_mult_prob_error"] > 1.001
    summary = json.loads((broken.run_dir / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    for part in (
        f"step 3: token_mult_prob_error is {row['token_mult_prob_error']:.6g}",
        "refit.prob_error_limit=1.001",
        f"python -m megatron_grpo.doctor {broken.run_dir} step=3",
        "checkpoints/step_2 is the last one",
    ):
        assert part in summary["reason"]
        assert part in broken.log()
    assert "Traceback" not in broken.log()
    assert len(list(read_rollouts(broken.run_dir, 3))) == 16 * 8
    mended = complete(TrainingRun(broken.run_dir, *FOUR_STEPS))
    assert without_timing(mended.metrics()) == without_timing(straight.metrics()[2:])


def test_the_first_step_that_is_off_is_told_once_and_all_weights_are_compared_at_once(tmp_path: Path) -> None:
    run = complete(
        TrainingRun(
            tmp_path / "run", *FOUR_STEPS, *DEFECT, "refit.weight_check_period=1000", "refit.prob_error_limit=null"
        )
    )
    rows = run.metrics()
    assert [row["token_mult_prob_error_off"] for row in rows] == [1] * 4
    assert run.log().count("training and generation disagree more than noise explains") == 1
    assert "This step's refit compares all weights. python -m megatron_grpo.doctor" in run.log()
    assert ["weight_check_s" in row["throughput"] for row in rows] == [True, False, False, False]
