"""The part of gpu-check that needs torch alone, rehearsed without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_a_rehearsal_finds_nothing_wrong() -> None:
    command = [sys.executable, str(SCRIPT), "--part", "torch_only", "--rehearse"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    (part,) = found["parts"].values()
    assert part["passed"] > 20
    assert found["timings"]["logprob"]["not_measured"].keys() == {"fused", "compiled", "products"}
    assert found["timings"]["fp8_blocks"]["gigabytes_per_s"]["triton"] is None
