"""Times torch's product by a plain matrix against oneDNN's by a packed copy, on a CPU; prints JSON.

    python benchmarks/small_matrices.py [--threads 1] [--repeats 60]

vLLM packs every matrix that it multiplies by on a CPU; the run leaves small ones as they are
(`megatron_grpo/cpu/vllm_worker.py`). `ratio` is plain over packed, by tokens, the best of some repeats of
each, which take turns. `pack_us` is what packing the matrix takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from header import header
from vllm import _custom_ops

from megatron_grpo.cpu.vllm_worker import is_small

SHAPES = (  # columns (what goes in), rows (what comes out)
    (64, 64),
    (96, 96),
    (96, 288),
    (128, 128),
    (128, 256),
    (128, 512),
    (256, 128),
    (256, 256),
    (256, 1024),
    (288, 96),
    (384, 384),
    (512, 128),
    (384, 3072),
    (1024, 4096),
)
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256, 1024)


def seconds(call: Callable[[], Any]) -> float:
    """Of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@torch.no_grad()
def compare(columns: int, rows: int, repeats: int) -> dict[str, Any]:
    """A matrix of this shape, for each number of tokens."""
    matrix = torch.randn(rows, columns)
    packs = [seconds(lambda: _custom_ops.create_onednn_mm(matrix.t(), 32)) for _ in range(5)]
    handle = _custom_ops.create_onednn_mm(matrix.t(), 32)
    ratios = {}
    for tokens in TOKENS:
        hidden = torch.randn(tokens, columns)
        plain = packed = float("inf")
        for _ in range(repeats):
            plain = min(plain, seconds(lambda: F.linear(hidden, matrix)))  # noqa: B023 - called at once
            packed = min(packed, seconds(lambda: _custom_ops.onednn_mm(handle, hidden, None)))  # noqa: B023
        ratios[tokens] = round(plain / packed, 2)
    small = is_small(matrix)
    return {"columns": columns, "rows": rows, "small": small, "pack_us": round(min(packs) * 1e6), "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = [compare(*shape, options.repeats) for shape in SHAPES]
    print(json.dumps({**header("small_matrices"), **vars(options), "shapes": found}, indent=2))


if __name__ == "__main__":
    main()
