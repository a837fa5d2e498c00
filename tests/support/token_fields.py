"""What tests do to all entries of a batch at once, and entries as plain lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.data.batch import TokenFields


def mapped(tokens: TokenFields, function: Callable[[Tensor], Tensor]) -> TokenFields:
    """Entries of the same names, each made by `function` from the one in `tokens`."""
    return TokenFields(**{name: function(values) for name, values in tokens.present().items()})


def as_lists(tokens: TokenFields) -> dict[str, list[Any]]:
    """Every entry that is there, by name."""
    return {name: values.tolist() for name, values in tokens.present().items()}


def pieces(values: Tensor | NDArray[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """A flat entry as one list a sequence."""
    numbers = iter(values.tolist())
    return [[next(numbers) for _ in range(length)] for length in lengths]
