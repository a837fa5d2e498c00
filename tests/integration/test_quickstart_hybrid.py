"""A run of a model with gated delta nets: engines in bfloat16, a policy in float32, and the doctor's word on both."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.whole_runs import complete
from tests.integration.runs import TrainingRun, read_jsonl

STEPS = 100
SHORT = (
    f"grpo.max_num_steps={STEPS}",
    f"grpo.val_period={STEPS}",
    "policy.optimizer.decay_steps=400",  # the beginning of the recipe
    f"checkpointing.save_period={STEPS - 1}",
    "checkpointing.keep_top_k=null",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    pytest.importorskip("torchvision")  # vLLM's module of these models imports it
    return complete(TrainingRun(tmp_path_factory.mktemp("hybrid") / "run", *SHORT, recipe="quickstart_hybrid"), 900)


@pytest.mark.slow
def test_it_learns_from_engines_that_round(run: TrainingRun) -> None:
    rows = run.metrics()
    errors = [row["token_mult_prob_error"] for row in rows]
    assert all(1.0005 < error < 1.03 for error in errors), "bfloat16 on one side, and nothing worse"
    assert not any(row["token_mult_prob_error_off"] for row in rows)
    first, last = (sum(row["reward"] for row in part) / 10 for part in (rows[:10], rows[-10:]))
    assert last > first + 0.1
    before, after = (row["val_accuracy"] for row in read_jsonl(run.run_dir / "validation.jsonl"))
    assert before <= 0.5
    assert after > before + 0.1


@pytest.mark.slow
def test_the_doctor_names_the_rounding(run: TrainingRun) -> None:
    command = [sys.executable, "-m", "megatron_grpo.doctor", str(run.run_dir), f"step={STEPS}", "--json"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert result.returncode == 1, result.stdout + result.stderr
    assert [finding["cause"] for finding in json.loads(result.stdout)["findings"]] == ["precision"]
