"""Quantisation-aware training: linear layers that compute with weights and inputs that modelopt has rounded.

Each row of a weight and each token of an input has a scale of its own, from the largest number there is in it now: so
nothing is calibrated, nothing is kept between steps or in a checkpoint, and merged matrices need no common scale.
Gradients pass the rounding as they are.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor

from megatron_grpo.config.schema import QuantizationFormat


class QuantizedLinear:
    """What quantised layers have in common, in front of the class of the layer itself."""

    tp_group: Any

    def __init__(self, *arguments: Any, quantization: QuantizationFormat, **keywords: Any) -> None:
        # Imported here because the package is optional, and takes seconds.
        from megatron_grpo.trainer.model.quantizers import row_quantizer, token_quantizer

        super().__init__(*arguments, **keywords)
        # A rank has whole rows and sees whole tokens, except where the columns of the matrix are split.
        group = self.tp_group if isinstance(self, RowParallelLinear) else None
        # In a tuple they are no submodules: a checkpoint has nothing to keep of them.
        self._quantizers = (token_quantizer(quantization, group), row_quantizer(quantization, group))

    def _forward_impl(self, input: Tensor, weight: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """[length, sequences, columns] to [length, sequences, rows], any float type; names are Megatron-Core's."""
        of_input, of_weight = self._quantizers
        # The class behind this one is the layer's.
        output: Tensor = super()._forward_impl(of_input(input), of_weight(weight), *arguments, **keywords)  # type: ignore[misc]
        return output
