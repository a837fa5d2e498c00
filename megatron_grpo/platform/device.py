"""Which kind of device this process computes on, decided once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Platform:
    """One kind of device and the collective library that belongs to it."""

    name: Literal["cuda", "cpu"]
    device: torch.device
    """Where a process keeps its tensors. Ray shows each worker only its own GPU, so that is always the first."""
    backend: Literal["nccl", "gloo"]


@cache
def current_platform() -> Platform:
    """CUDA when this process can see a GPU, else the CPU."""
    if torch.cuda.is_available():
        return Platform("cuda", torch.device("cuda", 0), "nccl")
    return Platform("cpu", torch.device("cpu"), "gloo")
