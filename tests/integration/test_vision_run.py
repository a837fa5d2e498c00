"""A whole run of the recipe that counts squares: it learns, resumes to the last digit, and its export counts as it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.models.source import COUNTING_VOCABULARY, IMAGE_MARKS
from megatron_grpo.prepare.counting import score_answers
from megatron_grpo.prepare.lessons import split_lessons
from tests.integration.runs import TrainingRun, read_jsonl, without_timing
from tests.integration.whole_runs import complete

pytestmark = pytest.mark.slow
pytest.importorskip("torchvision")  # vLLM's module of these models imports it

STEPS = 40
SHORT = (
    f"grpo.max_num_steps={STEPS}",
    f"grpo.val_period={STEPS}",
    "policy.optimizer.decay_steps=150",  # the beginning of the recipe
    f"checkpointing.save_period={STEPS - 2}",
    "checkpointing.keep_top_k=null",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return complete(TrainingRun(tmp_path_factory.mktemp("vision") / "run", *SHORT, recipe="quickstart_vision"), 900)


def test_it_learns_from_what_it_sees(run: TrainingRun) -> None:
    rows = run.metrics()
    assert all(row["token_mult_prob_error_max"] < 1.001 for row in rows), "both sides see the same images"
    before, after = (row["val_accuracy"] for row in read_jsonl(run.run_dir / "validation.jsonl"))
    assert after > before + 0.15
    placeholders = {COUNTING_VOCABULARY[mark] for mark in IMAGE_MARKS[:2]}
    for rollout in read_rollouts(run.run_dir, STEPS):
        sampled = [rollout["token_ids"][begin:end] for begin, end, _ in rollout["spans"]]
        assert not placeholders & {int(token) for part in sampled for token in part}
        assert "patches)" in rollout["columns"]["images"]


def test_from_a_checkpoint_it_ends_as_if_nothing_had_happened(run: TrainingRun, tmp_path: Path) -> None:
    start = f"checkpointing.resume={run.run_dir}/checkpoints/step_{STEPS - 2}"
    resumed = complete(TrainingRun(tmp_path / "run", *SHORT, start, recipe="quickstart_vision"))
    assert without_timing(resumed.metrics()) == without_timing(run.metrics()[STEPS - 2 :])


def test_an_exported_checkpoint_is_what_the_run_validated(run: TrainingRun, tmp_path: Path) -> None:
    checkpoint, output = run.run_dir / "checkpoints" / f"step_{STEPS}", tmp_path / "exported"
    command = [sys.executable, "-m", "megatron_grpo.export", f"checkpoint={checkpoint}", f"output={output}"]
    subprocess.run(command, check=True, timeout=120)
    model = AutoModelForImageTextToText.from_pretrained(output, dtype=torch.float32)
    _, _, val = split_lessons("counting")
    accuracy = float(score_answers(model, AutoProcessor.from_pretrained(output), val)[1].float().mean())
    assert accuracy == read_jsonl(run.run_dir / "validation.jsonl")[-1]["val_accuracy"]
    origin = Path(yaml.safe_load((run.run_dir / "config.yaml").read_text())["policy"]["model"]["path"])
    before, after = (load_file(folder / "model.safetensors") for folder in (origin, output))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == name.startswith("visual."), name
