"""A short run of the folder that python -m megatron_grpo.new writes, started from two working folders."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo import new
from tests.integration.runs import read_jsonl

ROOT = Path(__file__).parents[2]
SHORT = ("grpo.max_num_steps=2", "grpo.val_at_start=false", "grpo.max_val_samples=32", "logger.progress=false")


def train(folder: Path, *arguments: str, modules: Path = ROOT) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{modules}"}
    command = [sys.executable, "-m", "megatron_grpo.train", *arguments, *SHORT]
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.turns(3)
def test_rewards_and_turns_train_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    assert new.main(["riddles"]) == 0
    train(home, "--config-dir=riddles", "+exp=riddles", "run_dir=run")
    rows = read_jsonl(home / "run" / "metrics.jsonl")
    assert rows[-1]["reward"] == rows[-1]["reward/exact"] + 0.5 * rows[-1]["reward/digits"]
    paths = [f"data.{split}_path={home}/riddles/{split}.jsonl" for split in ("train", "val")]
    train(
        elsewhere, f"--config-dir={home}/riddles", "+exp=riddles_turns", "run_dir=run",
        f"prepare.folder={home}/outputs/prepared", *paths, modules=home,
    )  # fmt: skip
    rows = read_jsonl(elsewhere / "run" / "metrics.jsonl")
    assert 1 < rows[-1]["env/tries"] <= 2


@pytest.mark.turns(3)
@pytest.mark.parametrize(("kind", "test"), [("algorithm", "trains"), ("family", "computes")])
def test_a_kind_passes_those_of_its_tests_that_start_processes(
    kind: str, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert new.main([f"own_{kind}", f"kind={kind}"]) == 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", test, f"own_{kind}"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert "1 passed" in process.stdout, process.stdout + process.stderr
