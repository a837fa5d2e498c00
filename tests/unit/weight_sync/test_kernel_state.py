"""A layer's kernel and its tensors, as graphs have captured them, while the layer is converted anew."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_grpo.platform.device import Platform
from megatron_grpo.weight_sync import kernel_state
from megatron_grpo.weight_sync.kernel_state import KernelState


@dataclasses.dataclass
class Settings:
    scale: Tensor
    block: int = 128


class Kernel:
    def __init__(self, settings: Settings) -> None:
        self.settings, self.strides = settings, [torch.full((2,), 7)]
        self.call = functools.partial(print, settings.scale)


class Method:
    """Makes a kernel whose scale is derived from the layer's weight, in each conversion."""

    kernel: Kernel

    def convert(self, layer: Any, block: int = 128) -> None:
        self.settings = Settings(2.0 * layer.weight.detach(), block)
        self.kernel = Kernel(self.settings)
        layer.workspace = torch.full((3,), float(layer.weight[0]))


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(kernel_state, "detect_platform", lambda: Platform("cuda", torch.device("cpu"), "nccl"))
    monkeypatch.setattr(kernel_state, "_PACKAGES", (__name__,))
    made: Any = nn.Module()
    made.weight = nn.Parameter(torch.ones(2), requires_grad=False)
    made.quant_method = Method()
    made.quant_method.convert(made)
    return made


def test_the_first_objects_get_the_values_of_a_conversion(layer: Any) -> None:
    method = layer.quant_method
    kernel, settings, scale, workspace = method.kernel, method.settings, method.settings.scale, layer.workspace
    for factor in (3.0, 5.0):
        state = KernelState(layer)
        layer.weight.data.fill_(factor)
        method.convert(layer)
        assert method.kernel is not kernel
        state.keep()
        assert method.kernel is kernel
        assert kernel.settings is method.settings is settings
        assert settings.scale is scale
        assert kernel.call.args[0] is scale
        assert layer.workspace is workspace
        assert (scale.tolist(), workspace.tolist()) == ([2 * factor] * 2, [factor] * 3)


def test_a_conversion_that_is_given_up_leaves_the_first_objects(layer: Any) -> None:
    method, state = layer.quant_method, KernelState(layer)
    kernel = method.kernel
    method.convert(layer)
    state.put_back()
    assert method.kernel is kernel


def enlarge(layer: Any) -> None:
    layer.quant_method.convert(layer)
    layer.workspace = torch.zeros(4)


def leave_out(layer: Any) -> None:
    layer.quant_method.convert(layer)
    layer.workspace = None


def close(layer: Any) -> None:
    layer.quant_method.convert(layer)
    layer.quant_method.kernel.call = lambda: None


@pytest.mark.parametrize(
    ("convert", "path"),
    [
        (enlarge, "workspace"),
        (leave_out, "workspace"),
        (close, r"quant_method\.kernel\.call"),
        (lambda layer: layer.quant_method.convert(layer, block=64), r"quant_method\.settings\.block"),
    ],
)
def test_what_tensors_alone_cannot_bring_to_a_graph_is_refused(layer: Any, convert: Any, path: str) -> None:
    state = KernelState(layer)
    convert(layer)
    with pytest.raises(ValueError, match=rf"has changed {path}.*moe_backend or linear_backend"):
        state.keep()


def test_kernels_on_cpus_are_made_anew(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_state, "detect_platform", lambda: Platform("cpu", torch.device("cpu"), "gloo"))
    method, state = layer.quant_method, KernelState(layer)
    kernel = method.kernel
    method.convert(layer)
    state.keep()
    assert method.kernel is not kernel
