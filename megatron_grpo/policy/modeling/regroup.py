"""Tokens into rectangles and back, each with a backward that copies instead of adding up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def into_slots(tokens: Tensor, slots: Tensor, back: Tensor) -> Tensor:
    """Copy tokens to the slots of rectangles. What backward is given for slots that repeat a token has to be 0.

    Args:
        tokens: [tokens, ...], any float type.
        slots: [slots], int64: the token of each slot.
        back: [tokens], int64: the slot of each token; further slots that hold it only repeat it.

    Returns:
        [slots, ...], the dtype of the tokens.
    """
    taken: Tensor = _IntoSlots.apply(tokens, slots, back)
    return taken


def out_of_slots(values: Tensor, back: Tensor) -> Tensor:
    """Take each token's value out of its slot, and leave those of slots that repeat a token.

    Args:
        values: [slots, ...], any float type.
        back: [tokens], int64: the slot of each token, no slot twice.

    Returns:
        [tokens, ...], the dtype of the values.
    """
    taken: Tensor = _OutOfSlots.apply(values, back)
    return taken


class _IntoSlots(torch.autograd.Function):
    """A gather whose backward is a gather: autograd's own would add up into zeros, number by number."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return tokens.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


class _OutOfSlots(torch.autograd.Function):
    """A gather whose backward copies to the slots that were taken, and leaves 0 in the others."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.slots = len(values)
        return values.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        values = gradients[0].new_zeros(ctx.slots, *gradients[0].shape[1:])
        return values.index_copy_(0, back, gradients[0]), None
