"""Measures how fast a weight becomes FP8 and comes back, in torch and in Triton; prints JSON.

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
from megatron_grpo_kernels.fp8_blocks import ACTIVATION_BLOCK, WEIGHT_BLOCK

NOT_MEASURED = "Triton compiles for GPUs alone, and the time of its interpreter says nothing"


def measure(
    values: Tensor, block: tuple[int, int], quantise: Callable[..., Any], dequantise: Callable[..., Any]
) -> dict[str, float]:
    """Gigabytes a second there and back, of [rows, columns] in blocks."""
    size = values.numel() * values.element_size() / 1e9
    quantised, scales = quantise(values, block)
    return {
        "quantise": size / seconds(lambda: quantise(values, block), values.device),
        "dequantise": size / seconds(lambda: dequantise(quantised, scales, block, values.dtype), values.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("rows", "columns"):
        parser.add_argument(f"--{name}", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(options.rows, options.columns, generator=generator).to(device, getattr(torch, options.dtype))
    blocks = {"weight": WEIGHT_BLOCK, "activation": ACTIVATION_BLOCK}
    ways = {"torch": (fp8_blocks.quantise_in_torch, fp8_blocks.dequantise_in_torch)}
    if device.type == "cuda":
        from megatron_grpo_kernels import fp8_kernels

        ways["triton"] = (fp8_kernels.quantise_in_triton, fp8_kernels.dequantise_in_triton)
    found = {way: {name: measure(values, block, *pair) for name, block in blocks.items()} for way, pair in ways.items()}
    left_out = {} if "triton" in found else {"triton": NOT_MEASURED}
    result = {**header("fp8_blocks"), **vars(options), "gigabytes_per_s": {"triton": None, **found}}
    print(json.dumps({**result, "not_measured": left_out}, indent=2))


if __name__ == "__main__":
    main()
