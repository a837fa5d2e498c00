"""vLLM's layers in FP8 with a scale for each block of 128 x 128, given numbers and scales that are rounded already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron_grpo.refit.layer_memory import LayerMemory
from megatron_grpo.refit.vllm_layers import RebuiltLayer
from megatron_grpo_kernels.fp8_blocks import WEIGHT_BLOCK, scales_shape


def scales_name(parameter: str) -> str:
    """What vLLM calls the scales of a parameter in blocks."""
    return f"{parameter}_scale_inv"


def keeps_blocks(layer: nn.Module) -> bool:
    """Whether vLLM computes with such blocks in a layer, read from a checkpoint or rounded when it loads."""
    method: Any = getattr(layer, "quant_method", None)
    size = getattr(method, "weight_block_size", None)
    return size is not None and tuple(size) == WEIGHT_BLOCK


class BlockedLayer(RebuiltLayer):
    """Such a layer, whose plain weights are numbers and scales as a checkpoint in FP8 has them.

    Args:
        layer: vLLM's.
        memory: where the model's rebuilt layers have their plain weights; told when vLLM has made its form of them.
        parameters: names of those that come in FP8.
    """

    def __init__(self, layer: nn.Module, memory: LayerMemory, parameters: Iterable[str]) -> None:
        super().__init__(layer, memory)
        self._parameters = sorted(parameters)

    def strip(self) -> Any:
        """The layer, with plain weights that have no memory yet, in FP8 also where vLLM would read wider ones."""
        layer = super().strip()
        for name in self._parameters:
            shape = getattr(layer, name).shape
            scales = (*shape[:-2], *scales_shape(shape[-2:], WEIGHT_BLOCK))
            _register(layer, name, torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"))
            _register(layer, scales_name(name), torch.empty(scales, dtype=torch.float32, device="meta"))
        return layer

    def _process(self) -> None:
        from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
        from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

        layer, method = self._layer, self._layer.quant_method
        if isinstance(method, OnlineLinearBase):  # what it does behind its own rounding
            layer.input_scale = None
            kernel: Any = method
            kernel.fp8_linear.process_weights_after_loading(layer)
        elif isinstance(method, OnlineMoEMethodBase):
            numbers = [getattr(layer, name) for name in ("w13_weight", "w2_weight")]
            scales = [getattr(layer, scales_name(name)) for name in ("w13_weight", "w2_weight")]
            experts: Any = method
            experts._setup_kernel(layer, *numbers, *scales, None, None)
        else:
            super()._process()
        layer._already_called_process_weights_after_loading = True


def _register(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
