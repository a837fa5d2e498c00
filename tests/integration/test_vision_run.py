"""Whole runs that count squares: they learn by every method, resume to the last digit, and an export counts as it."""

import json
import math
import subprocess
import sys
from itertools import islice
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
from megatron_grpo.prepare.pictures import draw_counting_rows
from tests.integration.runs import TrainingRun, read_jsonl, without_timing
from tests.integration.whole_runs import complete, export

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
FEW = (
    "grpo.max_num_steps=3",
    "grpo.num_prompts_per_step=16",
    "grpo.val_period=3",
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=null",
    "policy.optimizer.warmup_steps=0",
    "policy.optimizer.decay_steps=50",
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
    output = export(run.run_dir / "checkpoints" / f"step_{STEPS}", tmp_path / "exported")
    model = AutoModelForImageTextToText.from_pretrained(output, dtype=torch.float32)
    _, _, val = split_lessons("counting")
    accuracy = float(score_answers(model, AutoProcessor.from_pretrained(output), val)[1].float().mean())
    assert accuracy == read_jsonl(run.run_dir / "validation.jsonl")[-1]["val_accuracy"]
    origin = Path(yaml.safe_load((run.run_dir / "config.yaml").read_text())["policy"]["model"]["path"])
    before, after = (load_file(folder / "model.safetensors") for folder in (origin, output))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == name.startswith("visual."), name


def test_an_evaluation_finds_what_validation_found(run: TrainingRun, tmp_path: Path) -> None:
    checkpoint, output = run.run_dir / "checkpoints" / f"step_{STEPS}", tmp_path / "evaluation"
    command = [sys.executable, "-m", "megatron_grpo.evaluate", f"checkpoint={checkpoint}", f"output={output}"]
    subprocess.run(command, check=True, timeout=500)
    (figures,) = json.loads((output / "results.json").read_text())["sets"].values()
    assert figures["accuracy"]["mean"] == read_jsonl(run.run_dir / "validation.jsonl")[-1]["val_accuracy"]
    pictures = {file.name for file in (output / "images").iterdir()}
    assert pictures <= {file.name for file in (run.run_dir / "images").iterdir()}


def test_supervised_training_learns_the_answers_to_pictures(tmp_path: Path) -> None:
    """The loss before the first step is that of transformers, and rows are the pictures' own."""
    keys = ("algorithm=sft", "data.response_key=answer", "grpo.num_generations_per_prompt=1")
    run = complete(TrainingRun(tmp_path / "run", *FEW, *keys, recipe="quickstart_vision"))
    folder = Path(yaml.safe_load((run.run_dir / "config.yaml").read_text())["policy"]["model"]["path"])
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    logprobs, _ = score_answers(model, AutoProcessor.from_pretrained(folder), split_lessons("counting")[2])
    validation = read_jsonl(run.run_dir / "validation.jsonl")
    assert validation[0]["val_loss"] == pytest.approx(-float(logprobs.mean()) / 2, rel=1e-4)  # a digit and the end
    assert all(row["valid_tokens"] == 16 * 2 and row["grad_norm"] > 0 for row in run.metrics())
    assert all("patches)" in row["columns"]["images"] for row in read_rollouts(run.run_dir, 1, kind="rows"))


def test_pairs_with_pictures_prefer_the_right_count(tmp_path: Path) -> None:
    rows = [{**row, "wrong": str(int(row["answer"]) % 8 + 1)} for row in islice(draw_counting_rows(96, 3), 96)]
    for name, part in (("train", rows[:64]), ("val", rows[64:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    files = (f"data.train_path={tmp_path}/train.jsonl", f"data.val_path={tmp_path}/val.jsonl")
    keys = ("algorithm=dpo", "data.chosen_key=answer", "data.rejected_key=wrong", "grpo.num_generations_per_prompt=2")
    run = complete(TrainingRun(tmp_path / "run", *FEW, *files, *keys, recipe="quickstart_vision"))
    before, after = (row["val_loss"] for row in read_jsonl(run.run_dir / "validation.jsonl"))
    assert before == pytest.approx(math.log(2), rel=1e-5), "policy and reference see the same pictures"
    assert after < before - 0.01


def test_a_value_model_sees_the_pictures(tmp_path: Path) -> None:
    keys = ("algorithm=ppo", "grpo.num_generations_per_prompt=2")
    run = complete(TrainingRun(tmp_path / "run", *FEW, *keys, recipe="quickstart_vision"))
    rows = run.metrics()
    assert all(row["value_grad_norm"] > 0 and row["token_mult_prob_error_max"] < 1.001 for row in rows)
    assert rows[0]["value_mean"] == 0 != rows[-1]["value_mean"]


def test_adapters_are_what_engines_sample_from(tmp_path: Path) -> None:
    keys = ("policy.lora.rank=8", "policy.lora.alpha=16")
    run = complete(TrainingRun(tmp_path / "run", *FEW, *keys, recipe="quickstart_vision"))
    rows = run.metrics()
    assert all(row["grad_norm"] > 0 and row["token_mult_prob_error_max"] < 1.001 for row in rows)
