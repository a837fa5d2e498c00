"""Every recipe for GPUs at its true size, in every precision: all phases of a rank of each distinct pipeline stage run
dry, and fit in 80 GB."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo.config.compose import compose_typed
from tests.support.recipes import COMMANDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PHASES = {"train", "refit", "checkpoint"}
MOVES = {"offload", "onload"}
"""Phases of a policy that shares its devices with the engines."""
MOST_BYTES = 76e9
"""Of a GPU of 80 GB; the rest is left to CUDA's context, NCCL's buffers and fragmentation."""


def check(recipe: str, *overrides: str) -> None:
    words = [recipe.removeprefix("+exp="), *overrides]
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "dry_recipes.py"), *words]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=ROOT)
    assert process.returncode == 0, process.stderr[-2000:]
    results = json.loads(process.stdout)["results"]
    assert results, "the recipe's model has no config.json in tests/data/hf_configs"
    config = compose_typed([recipe, *overrides]).config
    assert config is not None
    for result in results:
        assert "error" not in result, result
        assert result["phases"].keys() >= PHASES
        assert result["phases"].keys() & MOVES == (MOVES if config.generation.is_colocated else set())
        assert result["peak_gib"] * 2**30 <= MOST_BYTES, result
        assert result["held"].get("offload", 0.0) < 1.0, "GiB that a policy keeps while engines have the device"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_recipes_run_dry_and_fit(command: tuple[str, ...]) -> None:
    check(*command)
