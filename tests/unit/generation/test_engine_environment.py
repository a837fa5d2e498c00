"""Environment variables of an engine's processes on GPUs."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation import engine, engine_arguments
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.platform.device import Platform


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of an engine on a GPU, which the test may change."""
    variables = {"PATH": os.environ["PATH"]}
    monkeypatch.setattr(os, "environ", variables)
    for module in (engine, engine_arguments):
        monkeypatch.setattr(module, "detect_platform", lambda: Platform("cuda", torch.device("cpu"), "nccl"))
    return variables


def prepare(monkeypatch: pytest.MonkeyPatch, capability: int = 9, placement: str = "separate", **parallel: int) -> None:
    """Prepare an engine whose actor has eight GPUs of a compute capability."""
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(major=capability))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr("ray.get_gpu_ids", lambda: list(range(8)))
    config = GenerationConfig(placement=placement, parallel=GenerationParallelConfig(**parallel))
    settings = VllmSettings(model_path="model", config=config, precision="bfloat16", max_total_sequence_length=8)
    engine.prepare_processes(settings, "generation engine 0")


@pytest.mark.parametrize(("capability", "value"), [(8, None), (9, "0"), (10, None)])
def test_fp8_blocks_keep_their_scales_on_hopper(
    capability: int, value: str | None, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(monkeypatch, capability)
    assert environment.get("VLLM_USE_DEEP_GEMM_E8M0") == value


@pytest.mark.parametrize(("placement", "setting"), [("separate", None), ("colocated", "pinned_max_cached_size_mb:64")])
def test_sleeping_engines_pin_as_much_memory_as_their_weights_take(
    placement: str, setting: str | None, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(monkeypatch, placement=placement)
    assert environment.get("PYTORCH_ALLOC_CONF") == setting, "vLLM's own memory is no expandable segment"


@pytest.mark.parametrize(("parallel", "nvls"), [({"tensor": 8}, None), ({"tensor": 8, "pipeline": 2}, "0")])
def test_nccl_of_engines_over_machines_has_no_multicast(
    parallel: dict[str, int], nvls: str | None, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(monkeypatch, **parallel)
    assert (environment["NCCL_CUMEM_ENABLE"], environment.get("NCCL_NVLS_ENABLE")) == ("1", nvls)
    environment |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "1"}
    prepare(monkeypatch, **parallel)
    assert (environment["NCCL_CUMEM_ENABLE"], environment["NCCL_NVLS_ENABLE"]) == ("0", "1")
