"""A converted layer of vLLM that is loaded anew: with every version, in part, and given up in the middle."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from megatron_grpo.platform.device import Platform
from megatron_grpo.weight_sync import engine_layers
from megatron_grpo.weight_sync.engine_layers import ModelReload
from tests.support.refit_models import made_up_worker


class Doubling(QuantizeMethodBase):
    """vLLM's form of the layer, twice the plain weight; converted with a new kernel only."""

    def __init__(self) -> None:
        self.moe_kernel: object | None = None

    def create_weights(self, *_: Any) -> None: ...

    def apply(self, *_: Any) -> Any: ...

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.moe_kernel is None:
            self.moe_kernel = object()
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


@pytest.fixture
def model() -> nn.Module:
    layers = nn.Sequential(Experts(), Experts())
    record_metadata_for_reloading(layers)
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    return layers


def load_values(layer: Any, value: float, expert: int) -> None:
    layer.weight.weight_loader(layer.weight, torch.full((3,), value), expert)


def test_the_experts_of_other_ranks_may_come_before_and_after_the_own_one(model: Any) -> None:
    reload, layer, memory = ModelReload(made_up_worker(model)), model[0], model[0].weight.data_ptr()
    for version in (1.0, 2.0):
        reload.begin()
        opened = layer.weight  # a loop over tensors holds on to what it found by name
        for value, expert in ((9.0, 1), (version, 0), (9.0, 1)):
            opened.weight_loader(opened, torch.full((3,), value), expert)
        load_values(model[1], version, 0)
        reload.finish()
        assert layer.weight.tolist() == [[2.0 * version] * 3]
        assert layer.weight.data_ptr() == memory


def test_a_layer_of_which_nothing_comes_keeps_its_weights_and_its_kernel(model: Any) -> None:
    reload, kernel = ModelReload(made_up_worker(model)), model[1].quant_method.moe_kernel
    reload.begin()
    load_values(model[0], 4.0, 0)
    reload.finish()
    assert model[0].weight.tolist() == [[8.0] * 3]
    assert model[1].weight.tolist() == [[0.0] * 3]
    assert model[1].quant_method.moe_kernel is kernel


def test_a_reload_that_is_abandoned_makes_the_next_one_possible(model: Any) -> None:
    reload = ModelReload(made_up_worker(model))
    reload.begin()
    load_values(model[0], 9.0, 1)
    reload.abandon()
    assert model[0].weight.tolist() == [[0.0] * 3]
    assert model[0].quant_method.moe_kernel is not None
    reload.begin()
    load_values(model[0], 3.0, 0)
    reload.finish()
    assert model[0].weight.tolist() == [[6.0] * 3]


def test_a_kernel_whose_tensors_graphs_have_captured_stays_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = object()
    layer: Any = SimpleNamespace(quant_method=SimpleNamespace(moe_kernel=kernel))
    platform = Platform("cuda", torch.device("cuda", 0), "nccl")
    monkeypatch.setattr(engine_layers, "detect_platform", lambda: platform)
    assert engine_layers.delete_kernel(layer) is None
    assert layer.quant_method.moe_kernel is kernel


@pytest.mark.parametrize(
    ("now", "kinds"),
    [(torch.zeros(2, 3), r"is \[2, 3\] in torch.float32"), (None, "is gone")],
    ids=["transposed", "gone"],
)
def test_weights_that_vllm_has_rewritten_are_not_written_in_place(now: Tensor | None, kinds: str) -> None:
    """A later release may rewrite weights of layers that this one leaves as they are."""
    norm: Any = nn.Module()
    norm.weight = nn.Parameter(torch.zeros(3, 2), requires_grad=False)
    layers = nn.ModuleDict({"norm": norm})
    record_metadata_for_reloading(layers)
    ModelReload(made_up_worker(layers))
    norm.weight = None if now is None else nn.Parameter(now, requires_grad=False)
    with pytest.raises(ValueError, match=rf"norm.weight was \[3, 2\] in torch.float32 and {kinds}"):
        ModelReload(made_up_worker(layers))
