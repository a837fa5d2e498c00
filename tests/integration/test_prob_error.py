"""Whole runs whose engine computes something else than the policy: what is told, checked, refused, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_grpo.batch.rollout_files import read_rollouts
from tests.integration.whole_runs import complete
from tests.integration.runs import TrainingRun, without_timing

pytestmark = pytest.mark.slow

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
    run = complete(TrainingRun(
        tmp_path / "run", *FOUR_STEPS, *DEFECT, "refit.weight_check_period=1000", "refit.prob_error_limit=null"
    ))
    rows = run.metrics()
    assert [row["token_mult_prob_error_off"] for row in rows] == [1] * 4
    assert run.log().count("training and generation disagree more than noise explains") == 1
    assert "This step's refit compares all weights. python -m megatron_grpo.doctor" in run.log()
    assert ["weight_check_s" in row["throughput"] for row in rows] == [True, False, False, False]
