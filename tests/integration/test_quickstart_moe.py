"""Runs of a mixture of experts, shared by two ranks in training and by two in vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megatron_grpo.models.source import VOCABULARY
from megatron_grpo.prepare.lessons import split_lessons
from megatron_grpo.prepare.models import score_turns
from tests.integration.whole_runs import complete
from tests.integration.runs import TrainingRun, read_jsonl, without_timing

STEPS = 120
SHORT = (
    f"grpo.max_num_steps={STEPS}",
    f"grpo.val_period={STEPS}",
    "policy.optimizer.decay_steps=500",  # the beginning of the recipe
    f"checkpointing.save_period={STEPS - 3}",
    "checkpointing.keep_top_k=null",
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run without interruption."""
    return complete(TrainingRun(tmp_path_factory.mktemp("straight") / "run", *SHORT, recipe="quickstart_moe"), 900)


@pytest.mark.slow
def test_it_learns_from_what_its_own_experts_sampled(straight: TrainingRun) -> None:
    rows = straight.metrics()
    assert all(row["token_mult_prob_error_max"] < 1.001 for row in rows), "both sides have the same weights"
    assert all(0 < row["moe_load_lowest"] < 1 < row["moe_load_highest"] < 2 for row in rows)
    first, last = (sum(row["reward"] for row in part) / 10 for part in (rows[:10], rows[-10:]))
    assert last > first + 0.05
    before, after = (row["val_accuracy"] for row in read_jsonl(straight.run_dir / "validation.jsonl"))
    assert before <= 0.5
    assert after > before


@pytest.mark.slow
def test_from_a_checkpoint_it_ends_as_if_nothing_had_happened(straight: TrainingRun, tmp_path: Path) -> None:
    start = f"checkpointing.resume={straight.run_dir}/checkpoints/step_{STEPS - 3}"
    run = complete(TrainingRun(tmp_path / "run", *SHORT, start, recipe="quickstart_moe"))
    assert without_timing(run.metrics()) == without_timing(straight.metrics()[STEPS - 3 :])


@pytest.mark.slow
def test_an_exported_checkpoint_is_what_the_run_validated(straight: TrainingRun, tmp_path: Path) -> None:
    checkpoint, output = straight.run_dir / "checkpoints" / f"step_{STEPS}", tmp_path / "exported"
    command = [sys.executable, "-m", "megatron_grpo.export", f"checkpoint={checkpoint}", f"output={output}"]
    subprocess.run(command, check=True, timeout=120)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    _, train, val = split_lessons("addition_moe")
    accuracy = float(score_turns(model, val, VOCABULARY)[1].float().mean())
    assert accuracy == read_jsonl(straight.run_dir / "validation.jsonl")[-1]["val_accuracy"]
    folder = Path(yaml.safe_load((straight.run_dir / "config.yaml").read_text())["policy"]["model"]["path"])
    beginner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reward_before, reward = (score_turns(scored, train, VOCABULARY)[0].exp().mean() for scored in (beginner, model))
    assert reward > reward_before + 0.05
