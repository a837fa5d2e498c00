"""A run by an objective and advantages of the user's own folder, resumed and replayed where this folder is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import read_jsonl

ROOT = Path(__file__).parents[2]
OBJECTIVE = """
import torch
from shifts import shift_of

def dppo(logprobs, sampling_logprobs, advantages, *, high: float = 0.2, low: float = 0.2):
    shift = shift_of(logprobs.detach(), sampling_logprobs)
    is_masked = ((advantages > 0) & (shift > high)) | ((advantages < 0) & (-shift > low))
    loss = -advantages * (logprobs - sampling_logprobs).exp()
    return torch.where(is_masked, 0.0, loss), {"dppo/masked": is_masked, "dppo/high": torch.full_like(loss, high)}

def maxrl(rewards):
    mean = rewards.nanmean(dim=1, keepdim=True)
    return torch.where(mean > 0, (rewards - mean) / mean, 0.0)
"""
HELPER = """
def shift_of(logprobs, others):
    return logprobs.exp() - others.exp()
"""
FUNCTIONS = (
    "loss_fn.objective=my_losses.dppo", "loss_fn.objective_options.high=0.3",
    "grpo.adv_estimator.name=my_losses.maxrl", "grpo.use_leave_one_out_baseline=true",
)  # fmt: skip
SETTINGS = (
    "+exp=quickstart", "grpo.max_num_steps=2", "grpo.val_at_start=false", "grpo.max_val_samples=32",
    "policy.train_global_batch_samples=64", "checkpointing.save_period=1", "checkpointing.keep_top_k=null",
    "logger.replay_every=2", *FUNCTIONS,
)  # fmt: skip


def write_functions(folder: Path) -> None:
    (folder / "my_losses.py").write_text(OBJECTIVE)
    (folder / "shifts.py").write_text(HELPER)


def remove_functions(folder: Path) -> None:
    for file in folder.glob("*.py"):
        file.unlink()


def expect_recorded_functions(run_dir: Path) -> None:
    assert sorted(path.name for path in (run_dir / "code").iterdir()) == ["my_losses.py", "shifts.py"]


def call(folder: Path, command: str, *arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-m", f"megatron_grpo.{command}", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.ci
@pytest.mark.slow  # test_async_run.py trains and replays with every `make test`
def test_functions_of_the_users_folder_train_resume_and_replay(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    write_functions(home)
    run = home / "run"
    call(home, "train", *SETTINGS, "run_dir=run", "logger.progress=false")
    expect_recorded_functions(run)
    assert [round(row["dppo/high"], 6) for row in read_jsonl(run / "metrics.jsonl")] == [0.3, 0.3]
    remove_functions(home)
    call(
        elsewhere, "train", f"run_dir={run}", "grpo.max_num_steps=3", "loss_fn.objective_options.high=0.4",
        "trust_run=true",
    )  # fmt: skip
    assert [round(row["dppo/high"], 6) for row in read_jsonl(run / "metrics.jsonl")] == [0.3, 0.3, 0.4]
    assert "replayed" in call(elsewhere, "replay", str(run), "step=2", "device=cpu", "trust_run=true")
