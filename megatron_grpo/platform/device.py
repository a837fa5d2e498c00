"""The kind of device that a process computes on."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import TCPStore


@dataclass(frozen=True, slots=True)
class Platform:
    """A kind of device and its collective library.

    A dry platform (`planning.dry_run`) has tensors without numbers on the CPU, and makes every choice as on CUDA.
    """

    name: Literal["cuda", "cpu", "dry"]
    device: torch.device  # of a process's tensors: the first GPU that Ray shows it
    backend: Literal["nccl", "gloo", "fake"]
    host: Literal["cpu", "meta"] = "cpu"
    """Device of tensors in host memory; a dry platform distinguishes it from the device."""
    move: Callable[[NDArray[Any]], Tensor] = torch.from_numpy
    """Puts an array of any shape and type on the device."""
    layer_modules: Any = None
    """Modules in place of Transformer Engine's (Megatron-Core's `BackendSpecProvider`), for a dry run."""

    @property
    def is_like_cuda(self) -> bool:
        """True if layers, kernels and communication are those of GPUs."""
        return self.name != "cpu"


@cache
def detect_platform() -> Platform:
    """Return CUDA if this process sees a GPU, else the CPU."""
    if not torch.cuda.is_available():
        return Platform("cpu", torch.device("cpu"), "gloo")
    device = torch.device("cuda", 0)

    def copy_to_gpu(array: NDArray[Any]) -> Tensor:
        # From pinned memory, so that the host does not wait for the copy.
        return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)

    return Platform("cuda", device, "nccl", move=copy_to_gpu)


def require_gpus(assigned: Sequence[object]) -> None:
    """Check that torch sees a GPU if Ray assigned one (`list_assigned_gpus`)."""
    # Otherwise the process would silently compute on CPUs.
    if assigned and detect_platform().name != "cuda":
        raise RuntimeError(
            f"Ray gave this process GPU {', '.join(map(str, assigned))} of {socket.gethostname()}, and torch sees none "
            f"there (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}, torch for CUDA "
            f"{torch.version.cuda}): compare with nvidia-smi in the same container"
        )


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Open a store on a free port of this address; the result owns it."""
    listener = socket.create_server((host, 0))
    port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_s)
    descriptor = listener.detach()  # the store closes it
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, timeout=timeout)


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect a client to the store at this address; RuntimeError if nothing listens."""
    # A store listens before its address is sent, so one that does not was closed.
    try:  # TCPStore alone would try for up to twice its timeout
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise RuntimeError(f"no store listens at {host}:{port}: {error}") from None
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for the body, then restore them."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)
