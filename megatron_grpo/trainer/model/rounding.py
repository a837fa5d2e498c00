"""Linear layers of torch whose operands are rounded: simulated FP8 on any machine, and quantisation-aware training.

In both, gradients pass the rounding unchanged (straight-through estimator), and scales are computed from the current
values, so that nothing is calibrated or kept in a checkpoint.

- Simulated FP8 applies Transformer Engine's recipes: values are scaled so that the largest becomes E4M3's largest,
  rounded to E4M3 and scaled back. Scales are of the whole matrix or of whole blocks in every layout.
- Quantisation is modelopt's: each row of a weight and each token of an input has its own scale, so that merged matrices
  need no common one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor

from megatron_grpo.config.schema import Fp8Config, QuantizationFormat
from megatron_grpo.models.megatron_names import iterate_layers
from megatron_grpo_kernels.fp8_format import SMALLEST_SCALE

# The largest number of E4M3: 448. Operands are E4M3 in both formats; hybrid differs in gradients (E5M2).
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def round_tensor(values: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Round values at one scale for the matrix: 448 / max |x|.

    This is Transformer Engine's current scaling. Values and result are this rank's part of the matrix, [...], any float
    type; `process_group` has the other parts.
    """
    largest = values.abs().amax().float()
    if process_group is not None and process_group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=process_group)
    scale = torch.where(largest > 0, LARGEST / largest, torch.ones_like(largest))
    return _round_at_scale(values.float(), scale).to(values.dtype)


def round_blocks(values: Tensor, rows: int, columns: int, *, power_of_two: bool) -> Tensor:
    """Round values at one scale a block.

    Block scaling (blocks of 1 x 128 in activations, 128 x 128 in weights) divides by max |x| / 448, as vLLM's kernels
    and the refit do (`fp8_blocks.quantise`), to the same bits. MXFP8 (blocks of 1 x 32; OCP Microscaling 1.0)
    multiplies by the largest power of two that keeps max |x| within 448, so that nothing overflows. Values and result
    are [..., columns of the matrix], any float type.
    """
    height, width = values.numel() // values.shape[-1], values.shape[-1]
    assert height % rows == 0, f"{height} rows are not whole blocks of {rows}"
    assert width % columns == 0, f"{width} columns are not whole blocks of {columns}"
    blocks = values.reshape(height // rows, rows, width // columns, columns).float()
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    if power_of_two:
        # 448 / max = mantissa * 2^exponent with a mantissa in [1/2, 1): the power of two below it is 2^(exponent - 1).
        _, exponent = torch.frexp(LARGEST / largest)
        scale = torch.ldexp(torch.ones_like(largest), (exponent - 1).clamp(-126, 126))
        rounded = _round_at_scale(blocks, torch.where(largest > 0, scale, torch.ones_like(scale)))
    else:
        scale = largest / torch.full_like(largest, LARGEST)  # CUDA multiplies by the reciprocal of a plain number
        scale = torch.where(scale < SMALLEST_SCALE, torch.ones_like(scale), scale)
        rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.reshape(values.shape).to(values.dtype)


class RoundedLinear:
    """Simulated FP8, a mixin of linear layers (`layers.apply_mixin`)."""

    tp_group: Any
    fp8_on = True

    def __init__(self, *arguments: Any, fp8: Fp8Config, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._recipe = fp8.recipe

    def _forward_impl(self, input: Tensor, weight: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if self.fp8_on:
            # Other ranks hold other tokens, or other columns, of the same input.
            input_ranks = parallel_state.get_tensor_and_context_parallel_group()
            input = _StraightThrough.apply(input, self._round(input, 1, input_ranks))
            weight = _StraightThrough.apply(weight, self._round(weight, 128, self.tp_group))
        output: Tensor = super()._forward_impl(input, weight, *arguments, **keywords)  # type: ignore[misc]
        return output

    @torch.no_grad()
    def _round(self, values: Tensor, rows: int, process_group: dist.ProcessGroup) -> Tensor:
        if self._recipe == "tensorwise":
            return round_tensor(values, process_group)
        is_mxfp8 = self._recipe == "mxfp8"
        rows, columns = (1, 32) if is_mxfp8 else (rows, 128)
        return round_blocks(values, rows, columns, power_of_two=is_mxfp8)


def keep_outer_layers(chunk: Any, layers: int, fp8: Fp8Config) -> None:
    """Switch rounding off in the model's first and last layers."""
    for layer, _, layer_module in iterate_layers(chunk):
        is_outer = not fp8.first_layers_bf16 <= layer < layers - fp8.last_layers_bf16
        for module in layer_module.modules():
            if isinstance(module, RoundedLinear):
                module.fp8_on = not is_outer


def _round_at_scale(values: Tensor, scale: Tensor) -> Tensor:
    # Clamped: rounding may put the product just above 448, which E4M3 (it has no infinity) would turn into NaN.
    return (values * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() / scale


class _StraightThrough(torch.autograd.Function):
    """Returns `rounded`, and passes its gradient to `values`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class QuantizedLinear:
    """modelopt's rounding, a mixin of linear layers (`layers.apply_mixin`)."""

    tp_group: Any

    def __init__(self, *arguments: Any, quantization: QuantizationFormat, **keywords: Any) -> None:
        from modelopt.torch.quantization.config import QuantizerAttributeConfig  # lazy: optional, and takes seconds

        super().__init__(*arguments, **keywords)
        # A rank has whole rows and sees whole tokens, unless the columns of the matrix are split.
        process_group = self.tp_group if isinstance(self, RowParallelLinear) else None
        # Dynamic scales put every number within range, so there is nothing to clip in the backward pass either.
        bits = 8 if quantization == "int8" else (4, 3)  # of an integer, or of exponent and mantissa
        options: dict[str, Any] = {"num_bits": bits, "type": "dynamic", "pass_through_bwd": True}
        # One scale per token of an input, [length, sequences, columns], and per row of a weight, [rows, columns]. Kept
        # in a tuple they are not submodules, so checkpoints ignore them.
        self._quantizers = tuple(
            _define_split_quantizer()(QuantizerAttributeConfig(axis=axis, **options), process_group)
            for axis in ((0, 1), 0)
        )

    def _forward_impl(self, input: Tensor, weight: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        quantize_input, quantize_weight = self._quantizers
        input, weight = quantize_input(input), quantize_weight(weight)
        output: Tensor = super()._forward_impl(input, weight, *arguments, **keywords)  # type: ignore[misc]
        return output


@cache
def _define_split_quantizer() -> type:
    # Defined in a function because modelopt is optional.
    from modelopt.torch.quantization.nn import TensorQuantizer

    class SplitQuantizer(TensorQuantizer):  # type: ignore[misc,unused-ignore]
        def __init__(self, attributes: Any, process_group: dist.ProcessGroup | None) -> None:
            super().__init__(attributes)
            self._process_group = process_group

        def _get_amax(self, inputs: Tensor) -> Tensor:
            largest: Tensor = super()._get_amax(inputs).float()
            if self._process_group is not None and self._process_group.size() > 1:
                # Scales are dynamic, so they are reduced over ranks each time; modelopt does so only in calibration.
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._process_group)
            return largest

    return SplitQuantizer
