"""Small matrices of vLLM's CPU engine are multiplied by as they are, and written to by a refit; others are packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from megatron_grpo.cpu.vllm_worker import is_small, keep_small_matrices
from megatron_grpo.weights.refit.engine_layers import is_derived


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "small"),
    [
        (512, 128, torch.float32, True),
        (513, 128, torch.float32, False),
        (96, 256, torch.float32, True),
        (96, 257, torch.float32, False),
        (96, 96, torch.bfloat16, False),
    ],
)
def test_which_matrices_are_small(rows: int, columns: int, dtype: torch.dtype, small: bool) -> None:
    assert is_small(torch.empty(rows, columns, dtype=dtype)) == small


@pytest.mark.parametrize(("rows", "small"), [(48, True), (1024, False)])
def test_a_small_matrix_is_not_packed(rows: int, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)  # put back later
    keep_small_matrices()
    torch.manual_seed(0)
    layer: Any = torch.nn.Linear(128, rows, bias=False).requires_grad_(False)
    method = object.__new__(UnquantizedLinearMethod)  # made in a configuration of vLLM's, which this does not ask about
    layer.quant_method = method
    weight, hidden = layer.weight.clone(), torch.randn(7, 128)
    method.process_weights_after_loading(layer)
    torch.testing.assert_close(layer.cpu_linear(hidden, layer.weight, None), F.linear(hidden, weight))
    assert is_derived(layer) == (not small)
    if small:  # what is written to it counts at once
        layer.weight.mul_(2.0)
        torch.testing.assert_close(layer.cpu_linear(hidden, layer.weight, None), 2.0 * F.linear(hidden, weight))
