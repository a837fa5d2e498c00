"""vLLM recognises the GPU that NVML shows, and the parts that run on it import without a driver."""

import csv
import importlib
from pathlib import Path
from sysconfig import get_paths

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
    "megatron_grpo.weight_sync.engine_worker",
)


def test_the_platform_is_cuda() -> None:
    assert current_platform.is_cuda()


@pytest.mark.parametrize("name", PARTS)
def test_parts_import(name: str) -> None:
    importlib.import_module(name)


def test_no_file_comes_from_two_packages_with_different_contents() -> None:
    """Whichever is installed last would stay, and that differs from one installation to the next."""
    contents: dict[str, dict[str, str]] = {}
    for record in Path(get_paths()["purelib"]).glob("*.dist-info/RECORD"):
        for file, digest, _ in csv.reader(record.open()):
            if digest and not file.endswith(".pyc") and file != "build_backend.py":  # of the packages' own builds
                contents.setdefault(file, {})[digest] = record.parent.name
    clashes = {file: sorted(content.values()) for file, content in contents.items() if len(content) > 1}
    assert not clashes
