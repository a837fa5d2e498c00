"""In which types weights travel."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_grpo.models.families import weight_entries
from megatron_grpo.models.shape import ModelShape

_SIZES = {"float32": 4, "bfloat16": 2}


def wire_dtypes(shape: ModelShape, precision: str) -> list[str]:
    """Type of each tensor on its way, by row of the model's table: the policy's precision, but for biases of routing.

    Args:
        shape: sizes of the model.
        precision: `policy.precision`.
    """
    biases = ".expert_bias"  # which experts are chosen with; Megatron-Core keeps them in float32
    return ["float32" if entry.megatron[0].endswith(biases) else precision for entry in weight_entries(shape)]


def itemsizes(dtypes: Sequence[str]) -> list[int]:
    """Bytes of a number of each type."""
    return [_SIZES[dtype] for dtype in dtypes]
