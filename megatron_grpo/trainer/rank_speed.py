"""The speed of a rank's device, by a computation that waits for no other rank."""

from __future__ import annotations

import time

import torch

# A GPU multiplies 2048 x 2048 matrices in bfloat16 in tens of microseconds, and needs 24 MiB for them.
GPU_SIZE, GPU_PRODUCTS = 2048, 16
CPU_SIZE = 128
REPETITIONS = 5


def measure_probe(device: torch.device) -> float:
    """Measure seconds of a fixed computation on the device; the best of a few.

    In a step all ranks wait for the slowest, so their times of a phase are alike. Alone with the same matrices, a GPU
    whose clock is throttled takes longer than the others.
    """
    is_gpu = device.type == "cuda"
    size, dtype = (GPU_SIZE, torch.bfloat16) if is_gpu else (CPU_SIZE, torch.float32)
    with torch.no_grad():
        matrix = torch.full((size, size), 1 / size, device=device, dtype=dtype)
        return min(_time_on_gpu(matrix) if is_gpu else _time_on_cpu(matrix) for _ in range(REPETITIONS))


def _time_on_gpu(matrix: torch.Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    product = torch.empty_like(matrix)
    begin.record()
    for _ in range(GPU_PRODUCTS):
        torch.mm(matrix, matrix, out=product)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000


def _time_on_cpu(matrix: torch.Tensor) -> float:
    begin = time.perf_counter()
    torch.mm(matrix, matrix)
    return time.perf_counter() - begin
