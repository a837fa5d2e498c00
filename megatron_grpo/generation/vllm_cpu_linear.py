"""Which matrices vLLM's CPU engine multiplies by as they are. It packs all of them, which pays for large ones only."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

MOST_NUMBERS, MOST_COLUMNS = 1 << 16, 256
"""Size up to which torch's product is no loss beside oneDNN's by a packed copy: half the time for few tokens, about as
much for many, up to 1.7 times for 16 to 64 tokens in rows of 256 (`benchmarks/small_matrices.py`, float32). Packing
such a matrix takes most of a millisecond, at every refit."""


def is_small(weight: torch.Tensor) -> bool:
    """Whether a layer's weight, [rows, columns], is multiplied by as it is."""
    plain = weight.dim() == 2 and weight.dtype == torch.float32
    return plain and weight.numel() <= MOST_NUMBERS and weight.shape[1] <= MOST_COLUMNS


def keep_small_matrices() -> None:
    """Let vLLM leave small matrices as they are, so that a refit writes straight into them.

    To be called once in each worker, before the model is made.
    """
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm

    @wraps(original)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        if is_small(layer.weight):
            layer.cpu_linear = torch.nn.functional.linear
        else:
            original(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch
