"""Whole runs on GPUs of their own: one with a policy and an engine, and larger ones where there are more."""

import json
from pathlib import Path

import pytest
import torch

from tests.integration.runs import TrainingRun
from tests.integration.vllm_helpers import ON_GPUS

LAYOUTS = {
    "one and one": (2, ("policy.parallel.pipeline=1", "generation.parallel.pipeline=1")),
    "two stages each": (4, ()),
    "two replicas and two engines": (
        4,
        (
            "policy.parallel.pipeline=1",
            "policy.parallel.data=2",
            "generation.parallel.pipeline=1",
            "generation.parallel.data=2",
        ),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_learns_with_the_weights_that_it_refits(layout: str, tmp_path: Path) -> None:
    gpus, options = LAYOUTS[layout]
    if 0 < torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, and this machine has {torch.cuda.device_count()}")
    overrides = (f"cluster.gpus_per_node={gpus if ON_GPUS else 0}", "grpo.max_num_steps=5", *options)
    run = TrainingRun(tmp_path / "run", *overrides)
    assert run.finish(timeout_s=900) == 0, run.log()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["steps"] == 5
    assert summary["token_mult_prob_error_mean"] < 1.02
    run.assert_nothing_left()
