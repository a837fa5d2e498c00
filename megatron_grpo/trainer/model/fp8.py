"""FP8 numerics in torch: linear layers whose inputs and weights are rounded to what FP8 holds, on any machine.

What Transformer Engine's recipes do to the operands of a product, without its speed: values are scaled so that the
largest is E4M3's largest, rounded to E4M3 and scaled back. Scales are those of the whole matrix or of whole blocks in
every layout, so that a layout changes nothing. Gradients pass the rounding as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_grpo.config.schema import Fp8Config
from megatron_grpo.trainer.model.layers import with_front

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""The largest number of E4M3: 448. Operands are E4M3 in both formats; hybrid differs in gradients (E5M2)."""


def round_tensor(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Values at one scale for the whole matrix, 448 / max |x| (Transformer Engine's current scaling).

    Args:
        values: [...], any float type: this rank's part of the matrix.
        group: ranks that hold the other parts; None: there are none.

    Returns:
        [...], the dtype of the values.
    """
    largest = values.abs().amax().float()
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scale = torch.where(largest > 0, LARGEST / largest, torch.ones_like(largest))
    return _rounded_at(values.float(), scale).to(values.dtype)


def round_blocks(values: Tensor, rows: int, columns: int) -> Tensor:
    """Values at one scale a block: the largest power of two that keeps max |x| of the block within 448.

    This is Transformer Engine's block scaling (blocks of 1 x 128 in activations, 128 x 128 in weights), and, in blocks
    of 1 x 32, that of MXFP8 (OCP Microscaling 1.0, its scale rounded so that nothing overflows).

    Args:
        values: [..., columns of the matrix], any float type; whole blocks in the last dimension and, where `rows` is
            above 1, in the one before.
        rows: rows of a block.
        columns: columns of a block.

    Returns:
        As the values, in shape and dtype.
    """
    height, width = values.numel() // values.shape[-1], values.shape[-1]
    assert height % rows == 0, f"{height} rows are no whole blocks of {rows}"
    assert width % columns == 0, f"{width} columns are no whole blocks of {columns}"
    blocks = values.reshape(height // rows, rows, width // columns, columns).float()
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    # 448 / max = mantissa * 2^exponent with a mantissa in [1/2, 1): the power of two below it is 2^(exponent - 1).
    _, exponent = torch.frexp(LARGEST / largest)
    scale = torch.ldexp(torch.ones_like(largest), (exponent - 1).clamp(-126, 126))
    scale = torch.where(largest > 0, scale, torch.ones_like(scale))
    return _rounded_at(blocks, scale).reshape(values.shape).to(values.dtype)


class RoundedLinear:
    """What layers with FP8 numerics have in common, in front of the class of the layer itself."""

    config: Any
    weight: Tensor
    tp_group: Any
    fp8_on = True
    """Whether operands are rounded; the first and last layers of a model may keep theirs."""

    def __init__(self, *arguments: Any, fp8: Fp8Config, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._recipe = fp8.recipe

    def _forward_impl(self, input: Tensor, weight: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """[length, sequences, columns] to [length, sequences, rows], any float type; names are Megatron-Core's."""
        if self.fp8_on:
            input = _straight_through(input, self._input(input))
            weight = _straight_through(weight, self._weight(weight))
        # The class behind this one is the layer's.
        output: Tensor = super()._forward_impl(input, weight, *arguments, **keywords)  # type: ignore[misc]
        return output

    @torch.no_grad()
    def _input(self, values: Tensor) -> Tensor:
        if self._recipe == "tensorwise":
            # Neighbours may hold other tokens, or other columns.
            return round_tensor(values, parallel_state.get_tensor_and_context_parallel_group())
        return round_blocks(values, 1, 32 if self._recipe == "mxfp8" else 128)

    @torch.no_grad()
    def _weight(self, values: Tensor) -> Tensor:
        if self._recipe == "tensorwise":
            return round_tensor(values, self.tp_group)
        return round_blocks(values, 1, 32) if self._recipe == "mxfp8" else round_blocks(values, 128, 128)


def with_rounding(block: TransformerBlockSubmodules, fp8: Fp8Config) -> TransformerBlockSubmodules:
    """The spec of a stage's layers with FP8 numerics in every linear layer; changes it.

    Args:
        block: whose layers are made of torch modules.
        fp8: the recipe; not delayed, whose scales depend on earlier steps.
    """
    assert fp8.recipe != "delayed", "its scales depend on earlier steps"
    return with_front(block, RoundedLinear, fp8=fp8)


def keep_outer_layers(chunk: Any, layers: int, fp8: Fp8Config) -> None:
    """Leave the first and last layers of the model as they are, as many as the configuration says.

    Args:
        chunk: a GPTModel with FP8 numerics in its layers.
        layers: number of layers of the whole model.
        fp8: how many.
    """
    for layer in chunk.decoder.layers:
        outer = layer.layer_number <= fp8.first_layers_bf16 or layer.layer_number > layers - fp8.last_layers_bf16
        for module in layer.modules():
            if isinstance(module, RoundedLinear):
                module.fp8_on = not outer


def _rounded_at(values: Tensor, scale: Tensor) -> Tensor:
    """Values, [...], float32, at scales that broadcast to them, rounded to E4M3 (to even) and scaled back: float32."""
    # The product may be past 448 by a rounding, and E4M3 has no infinity to stop at.
    return (values * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() / scale


class _StraightThrough(torch.autograd.Function):
    """Rounded values whose gradient is that of the values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rounded: Tensor) -> Tensor:
        """Both [...], of one dtype."""
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """[...] as it is."""
        return grad_outputs[0], None


def _straight_through(values: Tensor, rounded: Tensor) -> Tensor:
    """Both [...], of one dtype: the rounded ones in the forward pass, the identity in the backward pass."""
    result: Tensor = _StraightThrough.apply(values, rounded)
    return result
