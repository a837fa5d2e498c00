"""A whole run of a family whose experts are unlike others', by the command that fills the table of families."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_moe"])
def test_three_steps_with_all_checks_of_refits(family: str, tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "family_runs.py"), str(file), family]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1000)
    run = json.loads(file.read_text())["runs"][family]
    assert (result.returncode, run["verdict"], run["steps"], run["canaries"]) == (0, "passed", 3, 3), run
    assert run["comparisons"] >= 1
    assert run["canary"] < 1e-4
