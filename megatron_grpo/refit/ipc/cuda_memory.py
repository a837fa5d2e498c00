"""Memory of a GPU that processes of one machine have in common, by handles of CUDA."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_grpo.refit.ipc.interface import SharedMemory

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
