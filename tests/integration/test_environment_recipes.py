"""Runs with environments of several turns: one of the user's own under the launcher, the calculator, two at a time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import TrainingRun, read_jsonl
from tests.integration.whole_runs import complete, read_options

OPTIONS = read_options("environment_recipes")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "environments.md"


@pytest.mark.slow  # tests/unit/environments/test_documented_environment.py runs the page's code with every `make test`
def test_an_environment_of_the_working_folder_runs_under_the_launcher(tmp_path: Path) -> None:
    """The page's own, on the quickstart's sums: each prompt has a number to guess."""
    (source,) = re.findall(r"## One of your own.*?```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "guessing.py").write_text(source)
    rows = "".join(f'{{"prompt": "{10 + row}+10=", "number": {row}}}\n' for row in range(64))
    (tmp_path / "rows.jsonl").write_text(rows)
    overrides = (
        "+exp=quickstart",
        "~env.addition",
        *OPTIONS["an_environment_of_the_working_folder_runs_under_the_launcher"],
    )
    environment = {**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(tmp_path / "run"), "PYTHONPATH": str(ROOT)}
    command = [str(ROOT / "launchers" / "local.sh"), *overrides]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stdout + process.stderr
    (step,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert step["failed_rollouts"] == 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_model_learns_to_call_a_calculator(tmp_path: Path) -> None:
    run = complete(TrainingRun(tmp_path / "run", recipe="quickstart_tools"), 2000)
    validations = read_jsonl(run.run_dir / "validation.jsonl")
    assert validations[0]["val_accuracy"] <= 0.3
    assert validations[-1]["val_accuracy"] >= 0.8


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_model_learns_a_task_of_reasoning_gym(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra reasoning_gym is not installed")
    run = complete(TrainingRun(tmp_path / "run", recipe="quickstart_reasoning_gym"), 2000)
    validations = read_jsonl(run.run_dir / "validation.jsonl")
    assert validations[0]["val_accuracy"] <= 0.5
    assert validations[-1]["val_accuracy"] >= 0.6


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_one_run_improves_two_tasks(tmp_path: Path) -> None:
    run = complete(TrainingRun(tmp_path / "run", recipe="quickstart_two_tasks"), 2000)
    first, *_, last = read_jsonl(run.run_dir / "validation.jsonl")
    for task in ("addition", "countdown"):
        assert last[f"val_task_accuracy/{task}"] > first[f"val_task_accuracy/{task}"] + 0.05
        assert f"task_reward/{task}" in run.metrics()[-1]
