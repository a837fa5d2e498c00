"""Whole runs of mixtures of experts and of gated delta nets."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megatron_grpo.models.source import VOCABULARY
from megatron_grpo.prepare.lessons import split_lessons
from megatron_grpo.prepare.models import score_turns
from tests.integration.runs import TrainingRun, read_jsonl, without_timing
from tests.integration.whole_runs import complete

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run_family(family: str, folder: Path) -> dict[str, Any]:
    file = folder / "runs.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "family_runs.py"), str(file), family]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1000)
    run: dict[str, Any] = json.loads(file.read_text())["runs"][family]
    assert result.returncode == (run["verdict"] == "failed"), result.stderr
    return run


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_moe", "deepseek_v3"])
def test_three_steps_with_all_checks_of_refits(family: str, tmp_path: Path) -> None:
    run = run_family(family, tmp_path)
    assert (run["verdict"], run["steps"], run["canaries"]) == ("passed", 3, 3), run
    assert run["comparisons"] >= 1
    assert run["canary"] < 1e-4


@pytest.mark.parametrize("family", ["minimax_m2", "glm_moe_dsa", "nemotron_h_moe"])
def test_what_no_engine_on_a_cpu_computes_is_refused_before_the_start(family: str, tmp_path: Path) -> None:
    run = run_family(family, tmp_path)
    assert run["verdict"] == "refused", run
    assert run["reason"].endswith("generation.server.urls")
    assert "steps" not in run


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


def test_the_doctor_names_the_rounding(run: TrainingRun) -> None:
    command = [sys.executable, "-m", "megatron_grpo.doctor", str(run.run_dir), f"step={STEPS}", "--json"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert result.returncode == 1, result.stdout + result.stderr
    assert [finding["cause"] for finding in json.loads(result.stdout)["findings"]] == ["precision"]


MIXTURE_STEPS = 120
MIXTURE_SHORT = (
    f"grpo.max_num_steps={MIXTURE_STEPS}",
    f"grpo.val_period={MIXTURE_STEPS}",
    "policy.optimizer.decay_steps=500",  # the beginning of the recipe
    f"checkpointing.save_period={MIXTURE_STEPS - 3}",
    "checkpointing.keep_top_k=null",
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run without interruption."""
    return complete(
        TrainingRun(tmp_path_factory.mktemp("straight") / "run", *MIXTURE_SHORT, recipe="quickstart_moe"), 900
    )


def test_it_learns_from_what_its_own_experts_sampled(straight: TrainingRun) -> None:
    rows = straight.metrics()
    assert all(row["token_mult_prob_error_max"] < 1.001 for row in rows), "both sides have the same weights"
    assert all(0 < row["moe_load_lowest"] < 1 < row["moe_load_highest"] < 2 for row in rows)
    first, last = (sum(row["reward"] for row in part) / 10 for part in (rows[:10], rows[-10:]))
    assert last > first + 0.05
    before, after = (row["val_accuracy"] for row in read_jsonl(straight.run_dir / "validation.jsonl"))
    assert before <= 0.5
    assert after > before


def test_from_a_checkpoint_it_ends_as_if_nothing_had_happened(straight: TrainingRun, tmp_path: Path) -> None:
    start = f"checkpointing.resume={straight.run_dir}/checkpoints/step_{MIXTURE_STEPS - 3}"
    run = complete(TrainingRun(tmp_path / "run", *MIXTURE_SHORT, start, recipe="quickstart_moe"))
    assert without_timing(run.metrics()) == without_timing(straight.metrics()[MIXTURE_STEPS - 3 :])


def test_an_exported_checkpoint_is_what_the_run_validated(straight: TrainingRun, tmp_path: Path) -> None:
    checkpoint, output = straight.run_dir / "checkpoints" / f"step_{MIXTURE_STEPS}", tmp_path / "exported"
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
