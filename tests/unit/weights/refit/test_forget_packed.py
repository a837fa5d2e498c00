"""A layer's packed copies and kernel before its weights are converted anew, on either platform."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_grpo.platform.device import Platform
from megatron_grpo.weights.refit import engine_layers


def layer_of_experts() -> Any:
    layer: Any = torch.nn.Linear(2, 2)
    layer.cpu_linear = torch.nn.functional.linear
    layer.quant_method = SimpleNamespace(moe_kernel=object())
    return layer


def test_a_kernel_whose_tensors_graphs_have_captured_stays_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of_experts()
    kernel = layer.quant_method.moe_kernel
    platform = Platform("cuda", torch.device("cuda", 0), "nccl")
    monkeypatch.setattr(engine_layers, "current_platform", lambda: platform)
    engine_layers._forget_packed(layer)
    assert layer.quant_method.moe_kernel is kernel


def test_packed_copies_go_on_a_cpu() -> None:
    layer = layer_of_experts()
    engine_layers._forget_packed(layer)
    assert not hasattr(layer, "cpu_linear")
    assert layer.quant_method.moe_kernel is None
