"""What tests do to all entries of a batch at once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_grpo.data.batch import TokenFields


def mapped(tokens: TokenFields, function: Callable[[Tensor], Tensor]) -> TokenFields:
    """Entries of the same names, each made by `function` from the one in `tokens`."""
    return TokenFields(**{name: function(values) for name, values in tokens.present().items()})
