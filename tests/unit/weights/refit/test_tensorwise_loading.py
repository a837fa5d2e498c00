"""A layer of vLLM that is loaded tensor by tensor is rebuilt once, whatever else is offered to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from megatron_grpo.weights.refit.engine_layers import TensorwiseLoading


class Doubling:
    """vLLM's form of the layer: twice the plain weight."""

    def __init__(self) -> None:
        self.made = 0

    def process_weights_after_loading(self, layer: Any) -> None:
        self.made += 1
        layer.weight = nn.Parameter(2.0 * layer.weight, requires_grad=False)


class Experts(nn.Module):
    """A rank's only expert, of two that are offered to it."""

    def __init__(self) -> None:
        super().__init__()
        weight: Any = nn.Parameter(torch.zeros(1, 3), requires_grad=False)
        weight.weight_loader = self.load
        self.weight = weight
        self.quant_method = Doubling()

    @staticmethod
    def load(param: Tensor, loaded: Tensor, expert: int) -> bool:
        if expert == 0:
            param.data[0].copy_(loaded)
        return expert == 0


def test_the_experts_of_other_ranks_may_come_after_the_last_of_this_ones() -> None:
    model = nn.Sequential(Experts())
    layer: Any = model[0]
    record_metadata_for_reloading(model)
    loading = TensorwiseLoading(model, torch.float32)
    for version in (1.0, 2.0):
        loading.begin()
        first = layer.weight
        first.weight_loader(first, torch.full((3,), 9.0), 1)
        opened = layer.weight  # a loop over tensors holds on to what it found by name
        opened.weight_loader(opened, torch.full((3,), version), 0)
        opened.weight_loader(opened, torch.full((3,), 9.0), 1)
        loading.finish()
        assert layer.weight.tolist() == [[2.0 * version] * 3]
        assert layer.quant_method.made == int(version)
