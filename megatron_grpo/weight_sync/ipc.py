"""Runs on ranks of the policy and in engines' workers: memory that processes of one machine and one user share.

A rank of the policy makes a `CudaMemory` or a `HostMemory` and sends its `address`, in types of JSON; a worker maps it
with `seen`. After writing or reading, each calls `settle` before it tells the other.
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


class CudaMemory:
    """Memory on this process's GPU, freed when this process and all that map it have released it."""

    def __init__(self, nbytes: int) -> None:
        torch.cuda.ipc_collect()  # frees memory that other processes have released
        # Another process needs a system call to map an expandable segment, which containers often forbid.
        before = torch._C._accelerator_getAllocatorSettings()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        try:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        finally:
            torch._C._accelerator_setAllocatorSettings(before)

    def address(self) -> list[Any]:
        """The GPU and torch's handle, with a reference count for one other process: call this once for each."""
        # The arguments that torch would pickle; those after the device make up the handle.
        _, (_, _, _, begin, _, _, device, *handle) = reduce_tensor(self.tensor)
        texts = [part.hex() if isinstance(part, bytes) else part for part in handle]
        return [gpu_name(device), self.tensor.numel(), begin, *texts]

    @classmethod
    def seen(cls, address: Sequence[Any]) -> Tensor | None:
        """[bytes], uint8: another process's memory, on a GPU that may differ from the one this process computes on.

        Raises:
            RuntimeError: this process does not see that GPU.
        """
        gpu, size, begin, *texts = address
        here = [gpu_name(index) for index in range(torch.cuda.device_count())]
        if gpu not in here:
            raise RuntimeError(f"its weights are on GPU {gpu}, and this process sees {', '.join(here)}")
        handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in texts]
        storage = torch.UntypedStorage, torch.uint8, here.index(gpu)
        return rebuild_cuda_tensor(Tensor, (size,), (1,), begin, *storage, *handle)

    @staticmethod
    def settle() -> None:
        """Wait for the GPU: other processes do not see which work is pending."""
        torch.cuda.synchronize()


def gpu_name(index: int) -> str:
    """A GPU's UUID, which is the same in every process."""
    return str(torch.cuda.get_device_properties(index).uuid)


class HostMemory:
    """Memory of a file outside the file system (memfd), freed with the last process that maps it; Linux only."""

    def __init__(self, nbytes: int) -> None:
        self._name = f"refit-{secrets.token_hex(8)}"
        self._file = os.fdopen(os.memfd_create(self._name), "r+b", buffering=0)
        self._file.truncate(max(nbytes, 1))
        self.tensor = _mapped(self._file)[:nbytes]

    def address(self) -> list[Any]:
        """The process's id, its number (descriptor) of the file, and the random name of the file."""
        return [os.getpid(), self._file.fileno(), self._name]

    @classmethod
    def seen(cls, address: Sequence[Any]) -> Tensor | None:
        """[bytes], uint8: another process's memory; None: it belongs to another machine or user."""
        process, file, name = address
        path = f"/proc/{process}/fd/{file}"
        try:
            if os.readlink(path) != f"/memfd:{name} (deleted)":  # on another machine any file may have this number
                return None
            with open(path, "r+b", buffering=0) as opened:
                return _mapped(opened)
        except OSError:
            return None

    @staticmethod
    def settle() -> None:
        """Nothing to wait for: writes of a CPU are visible at once."""


def _mapped(file: IO[bytes]) -> Tensor:
    return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


SharedMemory = CudaMemory | HostMemory


def shared_memory_on(device: torch.device, *, in_hosts: bool, on_gpus: bool) -> type[SharedMemory] | None:
    """The kind of memory in which ranks on such a device may hand messages over; None: messages are sent.

    Args:
        device: device that both ends compute on.
        in_hosts: whether ranks on CPUs may use shared memory (`refit.shared_memory`).
        on_gpus: whether both ends share GPUs and so must use shared memory, because NCCL has one rank a GPU.
    """
    if device.type == "cuda":
        return CudaMemory if on_gpus else None
    return HostMemory if in_hosts and hasattr(os, "memfd_create") else None
