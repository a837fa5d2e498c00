"""A model in 8 bits for vLLM: each row of the layers' matrices in integers or E4M3 with a scale, and what config.json
says of it, in the compressed-tensors format.

The numbers are those that quantisation-aware training computes with (policy/modeling/quantizers.py), in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.config.schema import QuantizationFormat

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The number that the largest absolute value of a row becomes."""
_ALMOST_ZERO = 2.0**-24
"""A row without any larger value is one of zeros, as in modelopt."""
_IN_CONFIG = {"int8": ("int-quantized", "int"), "fp8": ("float-quantized", "float")}
"""What compressed-tensors calls the format of the files, and the type of a number."""


def quantized_rows(weight: Tensor, quantization: QuantizationFormat) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits at a scale for each row, max |x| of the row / 127 (int8) or 448 (fp8); ties go to even.

    Args:
        weight: [rows, columns], any float type.
        quantization: what to round to.

    Returns:
        The numbers, [rows, columns], int8 or float8_e4m3fn; and the scales, [rows, 1], float32, which they are to be
        multiplied by.
    """
    values, bound = weight.float(), LARGEST[quantization]
    largest = values.abs().amax(dim=1, keepdim=True)
    largest = torch.where(largest > _ALMOST_ZERO, largest, torch.ones_like(largest))
    scaled = (values * (bound / largest)).clamp(-bound, bound)  # the product may be past the bound by a rounding
    numbers = scaled.round().to(torch.int8) if quantization == "int8" else scaled.to(torch.float8_e4m3fn)
    return numbers, largest / bound


def quantized_tensors(
    tensors: Iterable[tuple[str, Tensor]], quantization: QuantizationFormat
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a Hugging Face model without experts, with the matrices of its layers in 8 bits.

    Args:
        tensors: (name, tensor of any shape [...] and float type).
        quantization: what to round to.

    Yields:
        (name, tensor): embedding, head, norms and biases as they are; of each matrix the numbers, and the scales under
        the name with `_scale` behind it.
    """
    for name, tensor in tensors:
        if ".layers." in name and tensor.dim() == 2:
            numbers, scales = quantized_rows(tensor, quantization)
            yield name, numbers
            yield f"{name}_scale", scales
        else:
            yield name, tensor


def quantization_entry(quantization: QuantizationFormat) -> dict[str, Any]:
    """`quantization_config` of config.json: 8 bits for weights by row, and for inputs by token as they come."""
    layout, kind = _IN_CONFIG[quantization]
    number = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
