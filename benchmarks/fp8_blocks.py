"""Measures how fast a weight becomes FP8, in torch and in Triton; prints JSON.

    python benchmarks/fp8_blocks.py [--rows 8192] [--columns 8192] [--dtype bfloat16]

`gigabytes_per_s` counts the weight's bytes once. Triton is timed on a CUDA device, and null elsewhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from clock import seconds
from header import header
from torch import Tensor

from megatron_grpo_kernels import fp8_blocks

NOT_MEASURED = "Triton compiles for GPUs alone, and the time of its interpreter says nothing"


def measure(values: Tensor, quantise: Callable[[Tensor], Any]) -> float:
    """Gigabytes a second of [rows, columns]."""
    size = values.numel() * values.element_size() / 1e9
    return size / seconds(lambda: quantise(values), values.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("rows", "columns"):
        parser.add_argument(f"--{name}", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(options.rows, options.columns, generator=generator).to(device, getattr(torch, options.dtype))
    ways = {"torch": fp8_blocks.quantise_in_torch}
    if device.type == "cuda":
        from megatron_grpo_kernels import fp8_kernels

        ways["triton"] = fp8_kernels.quantise_in_triton
    figures = {way: measure(values, quantise) for way, quantise in ways.items()}
    left_out = {} if "triton" in figures else {"triton": NOT_MEASURED}
    result = {**header("fp8_blocks"), **vars(options), "gigabytes_per_s": {"triton": None, **figures}}
    print(json.dumps({**result, "not_measured": left_out}, indent=2))


if __name__ == "__main__":
    main()
