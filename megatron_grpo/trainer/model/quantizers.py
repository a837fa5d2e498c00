"""modelopt's quantisers, with scales that are those of the whole matrix when its columns are split over ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from torch import Tensor

from megatron_grpo.config.schema import QuantizationFormat

NUM_BITS = {"int8": 8, "fp8": (4, 3)}
"""modelopt's name of a format: bits of an integer, or of exponent and mantissa."""


class SplitQuantizer(TensorQuantizer):
    """A quantiser of a part of the columns of something, whose other columns are with other ranks.

    Args:
        attributes: modelopt's settings.
        group: ranks that together have all columns; None: this rank has them.
    """

    def __init__(self, attributes: QuantizerAttributeConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__(attributes)
        self._group = group

    def _get_amax(self, inputs: Tensor) -> Tensor:
        """Largest absolute values of what shares a scale, float32, of a shape that broadcasts to the inputs, [...]."""
        largest: Tensor = super()._get_amax(inputs).float()
        if self._group is not None and self._group.size() > 1:
            # modelopt asks other ranks when it calibrates; these scales are of this moment.
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return largest


def row_quantizer(quantization: QuantizationFormat, group: dist.ProcessGroup | None) -> SplitQuantizer:
    """Rounds a weight, [rows, columns], at a scale for each row.

    Args:
        quantization: what to round to.
        group: ranks that together have all columns; None: this rank has them.
    """
    return SplitQuantizer(_attributes(quantization, axis=0), group)


def token_quantizer(quantization: QuantizationFormat, group: dist.ProcessGroup | None) -> SplitQuantizer:
    """Rounds the input of a layer, [length, sequences, columns], at a scale for each token.

    Args:
        quantization: what to round to.
        group: ranks that together have all columns; None: this rank has them.
    """
    return SplitQuantizer(_attributes(quantization, axis=(0, 1)), group)


def _attributes(quantization: QuantizationFormat, **axis: Any) -> QuantizerAttributeConfig:
    # No number is beyond the largest one, so that there is nothing to clip in the backward pass either.
    return QuantizerAttributeConfig(num_bits=NUM_BITS[quantization], type="dynamic", pass_through_bwd=True, **axis)
