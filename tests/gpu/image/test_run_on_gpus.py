"""A whole run with NCCL between one policy GPU and one generation GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.integration.runs import TrainingRun

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL has one rank a GPU")


def test_a_run_refits_over_nccl(tmp_path: Path) -> None:
    run = TrainingRun(
        tmp_path / "run",
        "cluster.gpus_per_node=2",
        "policy.parallel.pipeline=1",
        "generation.parallel.pipeline=1",
        "grpo.max_num_steps=5",
    )
    assert run.finish(timeout_s=900) == 0, run.log()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["token_mult_prob_error_mean"] < 1.02
    run.assert_nothing_left()
