"""What every kind of memory that processes have in common can do."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor


class SharedMemory(ABC):
    """Memory of this process that others of this machine and this user can see."""

    address_numbers: ClassVar[int]
    """Numbers that an address is made of."""
    tensor: Tensor
    """[bytes], uint8: all of it."""

    @abstractmethod
    def __init__(self, nbytes: int) -> None:
        """Get so much memory."""

    @abstractmethod
    def address(self) -> list[int]:
        """[address_numbers], int64: where one other process finds it; to be asked for once for each of them."""

    @classmethod
    @abstractmethod
    def seen(cls, address: Sequence[int]) -> Tensor | None:
        """[bytes], uint8: the memory of another process; None: this process does not see it.

        Raises:
            RuntimeError: it does not, and there is no other way.
        """

    @staticmethod
    @abstractmethod
    def settle() -> None:
        """Return when whatever this process has begun to do in such memory is done, so that others may go on."""


_TEXT_BYTES = 2048
"""Room for an address as text."""


class CudaMemory(SharedMemory):
    """Memory on this process's GPU, which is gone when this process and all who see it have let go of it.

    Args:
        nbytes: size.
    """

    address_numbers = _TEXT_BYTES // 8

    def __init__(self, nbytes: int) -> None:
        torch.cuda.ipc_collect()  # what others have let go of since
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def address(self) -> list[int]:
        """The GPU and torch's handle, under a count of its own that says when the other process lets go."""
        # What torch would pickle: (..., offset in the storage, ...), and behind the device what the handle is made of.
        _, (_, _, _, begin, _, _, device, *handle) = reduce_tensor(self.tensor)
        memory, nbytes, offset, _requires_grad, counter, counter_offset, event, event_needed = handle
        return packed(
            {
                "gpu": gpu_name(device),
                "size": self.tensor.numel(),
                "begin": begin,
                "memory": memory.hex(),
                "nbytes": nbytes,
                "offset": offset,
                "counter": counter.hex(),
                "counter_offset": counter_offset,
                "event": event.hex(),
                "event_needed": event_needed,
            }
        )

    @classmethod
    def seen(cls, address: Sequence[int]) -> Tensor | None:
        """[bytes], uint8: the memory, on its own GPU, which may be another than this process computes on."""
        found = unpacked(address)
        here = [gpu_name(index) for index in range(torch.cuda.device_count())]
        if found["gpu"] not in here:
            raise RuntimeError(f"its weights are on GPU {found['gpu']}, and this process sees {', '.join(here)}")
        return rebuild_cuda_tensor(
            Tensor,
            (found["size"],),
            (1,),
            found["begin"],
            torch.UntypedStorage,
            torch.uint8,
            here.index(found["gpu"]),
            bytes.fromhex(found["memory"]),
            found["nbytes"],
            found["offset"],
            False,
            bytes.fromhex(found["counter"]),
            found["counter_offset"],
            bytes.fromhex(found["event"]),
            found["event_needed"],
        )

    @staticmethod
    def settle() -> None:
        """Wait for the GPU, whose work is not known to other processes."""
        torch.cuda.synchronize()


def gpu_name(index: int) -> str:
    """What every process calls a GPU, whatever its number there."""
    return str(torch.cuda.get_device_properties(index).uuid)


def packed(fields: dict[str, Any]) -> list[int]:
    """[_TEXT_BYTES / 8], int64: fields of JSON's types as numbers."""
    text = json.dumps(fields).encode()
    assert len(text) <= _TEXT_BYTES, f"{len(text)} bytes"
    return np.frombuffer(text.ljust(_TEXT_BYTES), dtype=np.int64).tolist()


def unpacked(numbers: Sequence[int]) -> dict[str, Any]:
    """The fields that `packed` made numbers of. They come from a process of this run; nothing in them is executed."""
    fields: dict[str, Any] = json.loads(np.array(numbers, dtype=np.int64).tobytes())
    return fields


_SECRET_BYTES = 8


class HostMemory(SharedMemory):
    """Memory without a name, which is gone with the last process that has it; Linux only.

    Args:
        nbytes: size.
    """

    address_numbers = 4

    @staticmethod
    def exists() -> bool:
        """Whether the operating system has it."""
        return hasattr(os, "memfd_create")

    def __init__(self, nbytes: int) -> None:
        self._file = os.fdopen(os.memfd_create("refit"), "r+b", buffering=0)
        self._file.truncate(nbytes + _SECRET_BYTES)
        whole = _mapped(self._file.fileno(), nbytes + _SECRET_BYTES)
        self.tensor = whole[:nbytes]
        self._secret = secrets.randbits(63)
        whole[nbytes:] = _bytes_of(self._secret)

    def address(self) -> list[int]:
        """Process, file, size, and a secret that stands behind the last byte."""
        return [os.getpid(), self._file.fileno(), self.tensor.numel(), self._secret]

    @classmethod
    def seen(cls, address: Sequence[int]) -> Tensor | None:
        """[bytes], uint8: the memory; None: it is of another machine or user, though the numbers may be known here."""
        process, file, nbytes, secret = address
        path = Path(f"/proc/{process}/fd/{file}")
        size = nbytes + _SECRET_BYTES
        try:
            # On another machine any file may have this number. It is only opened when it is an ordinary one of the
            # size.
            found = path.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                return None
            with path.open("r+b", buffering=0) as opened:
                whole = _mapped(opened.fileno(), size)
        except OSError:
            return None
        return whole[:nbytes] if torch.equal(whole[nbytes:], _bytes_of(secret)) else None

    @staticmethod
    def settle() -> None:
        """Nothing to wait for: what the processor has written is there."""


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _bytes_of(secret: int) -> Tensor:
    return torch.tensor([secret], dtype=torch.int64).view(torch.uint8)


def shared_memory_on(device: torch.device, *, in_hosts: bool, on_gpus: bool) -> type[SharedMemory] | None:
    """The memory in which messages between ranks that compute on such a device may be handed over; None: they are sent.

    Args:
        device: of both ends.
        in_hosts: whether CPUs are to hand them over.
        on_gpus: whether both ends are on the same GPUs, and have to: NCCL has one rank a GPU.
    """
    if device.type == "cuda":
        return CudaMemory if on_gpus else None
    return HostMemory if in_hosts and HostMemory.exists() else None
