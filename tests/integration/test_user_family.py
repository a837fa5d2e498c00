"""A run of a model whose family is in the user's own folder: trained, resumed and exported where this folder is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from megatron_grpo import new
from tests.integration.runs import read_jsonl

ROOT = Path(__file__).parents[2]
SHORT = (
    "sft.max_num_steps=2", "sft.val_period=2", "sft.max_val_samples=16", "sft.val_batch_size=16",
    "checkpointing.save_period=1", "checkpointing.keep_top_k=null", "policy.optimizer.decay_style=falls.linear",
    "policy.optimizer.warmup_steps=0", "logger.tracker=figures.Lines", "logger.progress=false",
)  # fmt: skip
FALLS = "def linear(progress, *, end: float = 0.5):\n    return 1 - (1 - end) * progress\n"
FIGURES = """
class Lines:
    def __init__(self, run_dir, resume_step):
        self.file = (run_dir / "lines.txt").open("a")
        self.file.write(f"from {resume_step}\\n")

    def log(self, step, values):
        if "train/loss" in values:
            self.file.write(f"{step} {values['train/learning_rate']:.3g}\\n")

    def log_table(self, step, name, rows):
        self.file.write(f"{step} {name} {len(rows)}\\n")

    def close(self, failed):
        self.file.write(f"failed={failed}\\n")
        self.file.close()
"""


def call(folder: Path, command: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-m", command, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_a_family_trains_resumes_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    assert new.main(["glm_of_mine", "kind=family"]) == 0
    (home / "falls.py").write_text(FALLS)
    (home / "figures.py").write_text(FIGURES)
    call(home, "glm_of_mine.make_model")
    run = home / "run"
    model = f"policy.model.path={home / 'glm_of_mine' / 'model'}"
    call(home, "megatron_grpo.train", "--config-dir=glm_of_mine", "+exp=glm_of_mine", *SHORT, model, "run_dir=run")
    files = sorted(str(path.relative_to(run / "code")) for path in (run / "code").rglob("*.py"))
    assert files == ["falls.py", "figures.py", "glm_of_mine/family.py"]
    for file in ("falls.py", "figures.py", "glm_of_mine/family.py"):
        (home / file).unlink()
    settings = ("sft.max_num_steps=3", "policy.optimizer.decay_options.end=0.25", "trust_run=true")
    call(elsewhere, "megatron_grpo.train", f"run_dir={run}", *settings)
    rows = read_jsonl(run / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]
    rates = [row["learning_rate"] for row in rows]
    assert rates == pytest.approx([2e-3 * 0.75, 2e-3 * 0.5, 2e-3 * 0.25])
    lines = (run / "lines.txt").read_text().splitlines()
    assert [line for line in lines if " val" not in line] == [
        "from None", "1 0.0015", "2 0.001", "failed=False", "from 2", "3 0.0005", "failed=False",
    ]  # fmt: skip
    assert read_jsonl(run / "validation.jsonl")[-1]["step"] == 3  # by engines that hold the trained weights
    checkpoint = f"checkpoint={run / 'checkpoints' / 'step_3'}"
    call(elsewhere, "megatron_grpo.export", checkpoint, "output=model", "trust_run=true")
    assert AutoModelForCausalLM.from_pretrained(elsewhere / "model").config.model_type == "glm"
    shutil.copytree(run / "code" / "glm_of_mine", elsewhere / "glm_of_mine")
    family = "policy.model.family=glm_of_mine.family:FAMILY"
    scores = call(
        elsewhere, "megatron_grpo.evaluate", checkpoint, "output=scores", family, "trust_run=true",
    )  # fmt: skip
    assert "accuracy" in scores
