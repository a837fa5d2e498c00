"""Nothing imports the support of CPUs where the platform is CUDA."""

import json
import subprocess
import sys

import pytest

# In a process of its own, whose platform is said to be CUDA before anything else is imported.
IMPORT_EVERYTHING = """
import importlib, json, sys
from pathlib import Path
import torch
from megatron_grpo.platform import device
cuda = device.Platform("cuda", torch.device("cuda", 0), "nccl")
device.detect_platform = lambda: cuda

import megatron_grpo
root = Path(megatron_grpo.__path__[0])
needs = []
for file in sorted(root.rglob("*.py")):
    parts = file.relative_to(root).with_suffix("").parts
    if parts[-1].startswith("cpu_") or parts[-1] == "megatron_on_cpu" or parts[0] == "conf" or parts[-1][:2] == "__":
        continue
    try:
        importlib.import_module(".".join(("megatron_grpo", *parts)))
    except ModuleNotFoundError as error:
        needs.append(error.name.split(".")[0])

import ray
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.generation import engine
from megatron_grpo.generation.engine_arguments import VllmSettings, make_engine_arguments
ray.get_gpu_ids = lambda: [0]
settings = VllmSettings(
    index=0,
    model_path="model",
    config=GenerationConfig(),
    precision="bfloat16",
    max_total_sequence_length=8,
    routed=RoutedForm(layers=(0,), experts=8, top_k=2),
)
engine.prepare_processes(settings, "generation engine 0")
arguments = make_engine_arguments(settings)
names = [name for name in sys.modules if name.startswith("megatron_grpo.")]
found = [name for name in names if name.split(".")[-1].startswith("cpu_") or name.endswith(".megatron_on_cpu")]
print(json.dumps([arguments, found, len(names), needs]))
"""


@pytest.mark.slow
def test_no_module_imports_cpu_support() -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_EVERYTHING], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    arguments, modules, count, needs = json.loads(process.stdout.splitlines()[-1])
    assert not modules
    assert count > 150, "the modules were imported"
    assert set(needs) <= {"modelopt", "transformer_engine", "vllm"}
    assert arguments["enable_return_routed_experts"] is True
    assert "worker_cls" not in arguments
