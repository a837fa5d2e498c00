"""Memory that two real processes have in common, and what is taken for none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.cluster.allocators import choose_cuda_settings
from megatron_grpo.weight_sync import shared_memory
from megatron_grpo.weight_sync.shared_memory import CudaMemory, HostMemory, choose_shared_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda")

READ = """
import sys
from megatron_grpo.weight_sync.shared_memory import HostMemory
memory = HostMemory.map_address(sys.argv[1:])
print(None if memory is None else memory.tolist())
"""


def _seen_elsewhere(address: list[Any]) -> str:
    command = [sys.executable, "-c", READ, *map(str, address)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_another_process_sees_what_is_written() -> None:
    shared = HostMemory(5)
    shared.tensor.copy_(torch.tensor([1, 2, 3, 4, 250], dtype=torch.uint8))
    assert _seen_elsewhere(shared.export_address()) == "[1, 2, 3, 4, 250]"


def test_what_is_written_later_is_seen_too_and_the_memory_ends_with_its_users() -> None:
    shared = HostMemory(1 << 20)
    address = shared.export_address()
    seen = HostMemory.map_address(address)
    assert seen is not None
    shared.tensor[7] = 9
    assert seen[7] == 9
    del shared
    assert seen[7] == 9, "who sees it keeps it"
    assert HostMemory.map_address(address) is None


@pytest.mark.parametrize("wrong", ["process", "file", "name"])
def test_an_address_that_is_not_exactly_right_is_none(wrong: str, tmp_path: Path) -> None:
    """As a process of another machine would read it, where files of these numbers may be anything."""
    shared = HostMemory(64)
    process, file, name = shared.export_address()
    with (tmp_path / name).open("wb") as other:
        addresses = {
            "process": (2**22 + 1, file, name),
            "file": (process, other.fileno(), name),
            "name": (process, file, HostMemory(64).export_address()[-1]),
        }
        assert HostMemory.map_address(addresses[wrong]) is None
    assert HostMemory.map_address([process, file, name]) is not None


def test_an_address_on_a_gpu_travels_as_json_and_is_what_torch_rebuilds_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the handles as text; `rebuild_cuda_tensor` gets what `reduce_tensor` gave, on this process's GPU."""
    tensor, (memory, counter, event) = torch.zeros(3, dtype=torch.uint8), map(os.urandom, (66, 12, 64))
    handle = (memory, 2**40, 512, False, counter, 4, event, True)
    reduced = (torch.Tensor, tensor.size(), (1,), 7, torch.UntypedStorage, torch.uint8, 1, *handle)
    monkeypatch.setattr(shared_memory, "reduce_tensor", lambda _: (None, reduced))
    monkeypatch.setattr(shared_memory, "read_gpu_uuid", lambda index: f"GPU-{'abc'[index]}")
    shared = object.__new__(CudaMemory)
    shared.tensor = tensor
    address = json.loads(json.dumps(shared.export_address()))

    monkeypatch.setattr(shared_memory, "rebuild_cuda_tensor", lambda *arguments: arguments)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(shared_memory, "read_gpu_uuid", lambda index: f"GPU-{'bca'[index]}")
    assert CudaMemory.map_address(address) == (
        torch.Tensor,
        (3,),
        (1,),
        7,
        torch.UntypedStorage,
        torch.uint8,
        0,
        *handle,
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="its weights are on GPU GPU-b, and this process sees "):
        CudaMemory.map_address(address)


def test_memory_for_other_processes_is_no_expandable_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, seen = [choose_cuda_settings()], []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", choose_cuda_settings())
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: seen.append(settings[-1]))
    CudaMemory(8)
    assert seen == ["expandable_segments:False"]
    assert settings[-1] == settings[0]


@pytest.mark.parametrize(
    ("device", "in_hosts", "on_gpus", "kind"),
    [
        (CPU, True, False, HostMemory),
        (CPU, False, False, None),
        (CPU, True, True, HostMemory),
        (GPU, True, False, None),
        (GPU, False, True, CudaMemory),
    ],
)
def test_who_hands_messages_over_in_what(
    device: torch.device, in_hosts: bool, on_gpus: bool, kind: type | None
) -> None:
    """GPUs of their own send over NCCL; the same GPUs cannot."""
    assert choose_shared_memory(device, in_hosts=in_hosts, on_gpus=on_gpus) is kind
