"""vLLM recognises the GPU that NVML shows, and the parts that run on it import without a driver."""

from __future__ import annotations

import importlib

import pytest
from vllm.platforms import current_platform

PARTS = (
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.v1.engine.async_llm",
    "vllm.cumem_allocator",
    "vllm.distributed.device_communicators.pynccl",
    "megatron_grpo.weights.refit.worker",
)


def test_the_platform_is_cuda() -> None:
    assert current_platform.is_cuda()


@pytest.mark.parametrize("name", PARTS)
def test_parts_import(name: str) -> None:
    importlib.import_module(name)
