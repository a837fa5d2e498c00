"""Which memory two ends of a link have in common."""

from __future__ import annotations

import torch

from megatron_grpo.refit.ipc.cuda_memory import CudaMemory
from megatron_grpo.refit.ipc.host_memory import HostMemory
from megatron_grpo.refit.ipc.interface import SharedMemory


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
