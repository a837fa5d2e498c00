"""Memory that processes of one machine and one user share.

A rank of the policy makes a `CudaMemory` or a `HostMemory` and sends its address; a worker of an engine maps it. After
writing or reading, each calls `synchronize` before it notifies the other.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from typing import IO, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor


def read_gpu_uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


class CudaMemory:
    """Memory on this process's GPU, freed with its last user."""

    def __init__(self, nbytes: int) -> None:
        torch.cuda.ipc_collect()  # frees memory that other processes have released
        # Another process needs a system call to map an expandable segment, which containers often forbid.
        previous = os.environ.get("PYTORCH_ALLOC_CONF") or "expandable_segments:False"  # torch tells its own since 2.13
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        try:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        finally:
            torch._C._accelerator_setAllocatorSettings(previous)

    def export_address(self) -> list[Any]:
        """Export the memory to one process, in types of JSON; call it once each."""
        # The arguments that torch would pickle; the handle follows the device.
        _, (_, _, _, begin, _, _, device, *handle) = reduce_tensor(self.tensor)
        handle_json = [part.hex() if isinstance(part, bytes) else part for part in handle]
        return [read_gpu_uuid(device), self.tensor.numel(), begin, *handle_json]

    @classmethod
    def map_address(cls, address: Sequence[Any]) -> Tensor | None:
        """Map another process's memory: [bytes], uint8; RuntimeError: its GPU is not visible here."""
        gpu, size, begin, *handle_json = address
        visible = [read_gpu_uuid(index) for index in range(torch.cuda.device_count())]
        if gpu not in visible:
            raise RuntimeError(f"its weights are on GPU {gpu}, and this process sees {', '.join(visible)}")
        handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle_json]
        storage = torch.UntypedStorage, torch.uint8, visible.index(gpu)
        return rebuild_cuda_tensor(Tensor, (size,), (1,), begin, *storage, *handle)

    @staticmethod
    def synchronize() -> None:
        """Wait for the GPU: other processes do not see which work is pending."""
        torch.cuda.synchronize()


class HostMemory:
    """Memory of an anonymous file (memfd), freed with the last user; Linux only."""

    def __init__(self, nbytes: int) -> None:
        self._name = f"refit-{secrets.token_hex(8)}"
        self._file = os.fdopen(os.memfd_create(self._name), "r+b", buffering=0)
        self._file.truncate(max(nbytes, 1))
        self.tensor = _map_file(self._file)[:nbytes]

    def export_address(self) -> list[Any]:
        """Export the memory: this process, and number and random name of the file."""
        return [os.getpid(), self._file.fileno(), self._name]

    @classmethod
    def map_address(cls, address: Sequence[Any]) -> Tensor | None:
        """Map another process's memory: [bytes], uint8; None: another machine or user."""
        process, descriptor, name = address
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            if os.readlink(path) != f"/memfd:{name} (deleted)":  # on another machine any file may have the descriptor
                return None
            with open(path, "r+b", buffering=0) as file:
                return _map_file(file)
        except OSError:
            return None

    @staticmethod
    def synchronize() -> None:
        """Do nothing: writes of a CPU are visible at once."""


def _map_file(file: IO[bytes]) -> Tensor:
    return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


SharedMemory = CudaMemory | HostMemory


def choose_shared_memory(device: torch.device, *, in_hosts: bool, on_gpus: bool) -> type[SharedMemory] | None:
    """Choose the memory in which ranks may hand messages over; None: messages are sent.

    `in_hosts`: ranks on CPUs may use it. `on_gpus`: both ends share GPUs, where NCCL allows one rank a GPU.
    """
    if device.type == "cuda":
        return CudaMemory if on_gpus else None
    return HostMemory if in_hosts and hasattr(os, "memfd_create") else None
