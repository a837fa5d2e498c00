"""vLLM's workers load few of our modules, in every mode: each module takes time and memory in each of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST_MODULES = 25

LOAD = """
import sys
from types import SimpleNamespace

from megatron_grpo.weight_sync import engine_worker

mode = sys.argv[1]
try:  # reaches the receiver's own work, which fails on a worker without a model
    engine_worker.make_receiver(SimpleNamespace(), mode, [], {}, 0)
except (AttributeError, KeyError):
    pass
import megatron_grpo.weight_sync.weight_trace
import megatron_grpo.weight_sync.fingerprints
names = [name for name in sys.modules if name.partition(".")[0] in ("megatron_grpo", "megatron_grpo_kernels")]
print("\\n".join(sorted(names)))
"""


SLOW = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("broadcast", "files")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reshard", *SLOW])
def test_a_worker_loads_few_modules(mode: str) -> None:
    command = [sys.executable, "-c", LOAD, mode]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    modules = result.stdout.split()
    assert "megatron_grpo.weight_sync.engine_worker" in modules
    assert "megatron_grpo.weight_sync.placeholder_loader" in modules, "vLLM finds the loader by its name alone"
    assert len(modules) <= MOST_MODULES, modules
