"""Which hidden states go through the model's head: only those that the loss, or whoever asks, looks at."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


class RowSelection:
    """Goes before the head of a last pipeline stage. A head is the largest matrix of a small model: prompts and padding
    cost nothing there."""

    places: Tensor | None = None
    """[rows], int64: places of the wanted tokens of the next microbatch; None: all."""

    def __init__(self, sequence_parallel: bool) -> None:
        self._sequence_parallel = sequence_parallel

    def __call__(self, _: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """A forward pre-hook: [length, sequences, hidden] of hidden states to [rows, 1, hidden]."""
        hidden: Tensor = inputs[0]
        if self._sequence_parallel:
            # The head's gradient is complete on every rank (it is added up in there), so each takes its part of it.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        if self.places is not None:
            assert hidden.shape[1] == 1, "places are those of packed sequences"
            hidden = hidden[self.places]
        return (hidden, *inputs[1:])


def select_rows(model: GPTModel) -> None:
    """Put a `RowSelection` before the head of a model that ends in one."""
    if not model.post_process:
        return
    selection = RowSelection(model.config.sequence_parallel)
    model.output_layer.sequence_parallel = False  # gathered already
    model.output_layer.register_forward_pre_hook(selection)
    model.output_layer.row_selection = selection


def row_selection(model: GPTModel) -> RowSelection:
    """That of a model whose last stage is here."""
    selection: RowSelection = model.output_layer.row_selection
    return selection
