"""benchmarks/data_plane.py on a small step: the tokens of a step stay out of the driver."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data_plane.py"
SAMPLES, TOKENS = 128, 2048
DRIVER_BYTES = 1500
"""What the driver may move for a response, however long it is: its outcome, its place, its share of prompt and plan."""


@pytest.mark.slow
def test_the_tokens_of_a_step_stay_out_of_the_driver() -> None:
    options = {"samples": SAMPLES, "tokens": TOKENS, "replicas": 2, "group": 8, "minibatches": 2, "steps": 1}
    command = [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in options.items())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["samples"], result["tokens_per_sample"]) == (SAMPLES, TOKENS)
    assert result["driver_bytes"] < DRIVER_BYTES * SAMPLES
    assert result["driver_bytes_fraction"] == pytest.approx(result["driver_bytes"] / result["token_bytes"], rel=1e-3)
    assert result["token_bytes"] == pytest.approx(8 * SAMPLES * TOKENS, rel=0.2)
    assert 0 < result["driver_cpu_s"] < 10
    assert result["driver_memory_gib"] < 0.5
    assert {"generation", "logprobs", "train"} <= result["phases_s"].keys()
