"""What tests do to all entries of a batch at once, and entries as plain lists."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields


def mapped(tokens: TokenFields, function: Callable[[Tensor], Tensor]) -> TokenFields:
    """Entries of the same names, each made by `function` from the one in `tokens`."""
    return TokenFields(**{name: function(values) for name, values in tokens.as_dict().items()})


def in_rectangles(batch: TokenBatch) -> TokenFields:
    """Every entry as [sequences, longest], padded on the right with zeros; token ids become int64."""
    rows = mapped(batch.fields, lambda values: pad_sequence(values.split(batch.lengths), batch_first=True))
    return rows if rows.token_ids is None else replace(rows, token_ids=rows.token_ids.long())


def as_lists(tokens: TokenFields) -> dict[str, list[Any]]:
    """Every entry that is there, by name."""
    return {name: values.tolist() for name, values in tokens.as_dict().items()}


def pieces(values: Tensor | NDArray[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """A flat entry as one list a sequence."""
    numbers = iter(values.tolist())
    return [[next(numbers) for _ in range(length)] for length in lengths]
