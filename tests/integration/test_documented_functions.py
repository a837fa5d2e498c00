"""The script of docs/python.md that calls the functions of a run itself, as it stands there, for each algorithm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import read_jsonl

pytestmark = pytest.mark.slow  # three whole runs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_async", "quickstart_ppo"])
def test_the_script_trains(tmp_path: Path, recipe: str) -> None:
    section = (ROOT / "docs" / "python.md").read_text().partition("## The functions of a run")[2]
    (tmp_path / "functions.py").write_text(re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0])
    options = [f"run_dir={tmp_path}/run", "logger.progress=false", "checkpointing=none", "grpo.val_at_start=false"]
    options += ["grpo.max_num_steps=2", *(["ppo.policy_training_start_step=0"] if "ppo" in recipe else [])]
    command = [sys.executable, "functions.py", recipe, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580)
    assert process.returncode == 0, process.stdout + process.stderr
    before, after, tensors = process.stdout.splitlines()[-1].split()
    assert 0 <= float(before) <= 1
    assert int(tensors) > 0
    steps = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    (validated,) = read_jsonl(tmp_path / "run" / "validation.jsonl")
    assert float(after) == pytest.approx(validated["val_accuracy"]), "the weights after the last step, greedily sampled"
