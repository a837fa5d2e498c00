"""Every recipe for GPUs at its true size: all phases of a first, middle and last rank run dry, and fit in 80 GB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SMALLEST = "qwen3_0_6b_one_gpu"
RECIPES = sorted(
    file.stem for file in (ROOT / "conf" / "exp").glob("*.yaml") if not file.stem.startswith(("quickstart", SMALLEST))
)
PHASES = {"logprobs", "train", "offload", "onload", "refit", "checkpoint"}
MOST_BYTES = 76e9
"""Of a GPU of 80 GB; the rest is left to CUDA's context, NCCL's buffers and fragmentation."""


def check(recipe: str) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "dry_recipes.py"), recipe]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)["results"]
    assert results, "the recipe's model has no config.json in tests/data/hf_configs"
    for one in results:
        assert "error" not in one, one
        assert one["phases"].keys() >= PHASES
        assert one["peak_gib"] * 2**30 <= MOST_BYTES, one
        assert one["held"]["offload"] < 1.0, "GiB that a policy keeps while engines have the device"


def test_the_smallest_recipe_runs_dry() -> None:
    check(SMALLEST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_run_dry_and_fit(recipe: str) -> None:
    check(recipe)
