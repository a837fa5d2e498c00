"""A whole run of a family whose experts are unlike others', by the command that fills the table of families."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_family(family: str, folder: Path) -> dict[str, Any]:
    file = folder / "runs.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "family_runs.py"), str(file), family]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1000)
    run: dict[str, Any] = json.loads(file.read_text())["runs"][family]
    assert result.returncode == (run["verdict"] == "failed"), result.stderr
    return run


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_moe", "deepseek_v3"])
def test_three_steps_with_all_checks_of_refits(family: str, tmp_path: Path) -> None:
    run = run_family(family, tmp_path)
    assert (run["verdict"], run["steps"], run["canaries"]) == ("passed", 3, 3), run
    assert run["comparisons"] >= 1
    assert run["canary"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["minimax_m2", "glm_moe_dsa", "nemotron_h_moe"])
def test_what_no_engine_on_a_cpu_computes_is_refused_before_the_start(family: str, tmp_path: Path) -> None:
    run = run_family(family, tmp_path)
    assert run["verdict"] == "refused", run
    assert run["reason"].endswith("generation.server.urls")
    assert "steps" not in run
