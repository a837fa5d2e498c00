"""FP8 numerics written a second time: E4M3 by arithmetic instead of a cast, scales block by block in Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

Scales = Callable[[Tensor], Tensor]
"""From a matrix, [rows, columns], to the scale of each of its numbers."""

SHARED = {name: names for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) for name in names}
"""Matrices that are one in Megatron-Core, and have one scale when a whole tensor has."""


def e4m3(values: Tensor) -> Tensor:
    """Values within 448 to the nearest number of 3 bits of mantissa and exponents from -6 on, ties to even."""
    exponent = values.abs().clamp(min=2.0**-20).log2().floor().clamp(min=-6)
    step = 2.0 ** (exponent - 3)
    return (values / step).round() * step


def block_scales(values: Tensor, rows: int, columns: int, power_of_two: bool) -> Tensor:
    """At every number, what its block is multiplied by (the largest power of two that keeps it within 448), or else
    divided by (its largest number / 448)."""
    scales = torch.ones_like(values)
    for top, left in product(range(0, values.shape[0], rows), range(0, values.shape[1], columns)):
        block = (slice(top, top + rows), slice(left, left + columns))
        largest = values[block].abs().max()
        if largest:
            scales[block] = 2.0 ** math.floor(math.log2(448 / largest.item())) if power_of_two else largest / 448
    return scales


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, scale: Tensor, divides: bool) -> Tensor:
        return e4m3(values / scale) * scale if divides else e4m3(values * scale) / scale

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def rounded(values: Tensor, recipe: str, weight: bool, shared: list[Tensor]) -> Tensor:
    """A matrix, [rows, columns], as the recipe rounds it; `shared` are all matrices that have its scale."""
    if recipe == "tensorwise":
        largest = max(one.detach().abs().max().item() for one in shared)
        scale = torch.full_like(values, 448 / torch.tensor(largest).item())
    else:
        side = 32 if recipe == "mxfp8" else 128
        rows = side if weight and recipe == "blockwise" else 1
        scale = block_scales(values.detach(), rows, side, power_of_two=recipe == "mxfp8")
    return _Rounded.apply(values, scale, recipe == "blockwise")


def simulate(model: torch.nn.Module, recipe: str, layers: list[int]) -> torch.nn.Module:
    """A transformers model whose linear layers compute with rounded operands; changes it.

    Args:
        model: a decoder of two-dimensional linear layers without biases in `model.layers`.
        recipe: tensorwise, blockwise or mxfp8.
        layers: numbers of the layers that do.
    """
    for number in layers:
        for parent, name, linear in list(_linears(model.model.layers[number])):
            mates = [getattr(parent, mate).weight for mate in SHARED.get(name, (name,))]

            def forward(values: Tensor, linear: torch.nn.Linear = linear, mates: list[Tensor] = mates) -> Tensor:
                flat = values.flatten(0, -2)
                inputs = rounded(flat, recipe, weight=False, shared=[flat])
                weight = rounded(linear.weight, recipe, weight=True, shared=mates)
                return F.linear(inputs, weight).unflatten(0, values.shape[:-1])

            linear.forward = forward
    return model


def _linears(layer: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    for parent in layer.modules():
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.Linear):
                yield parent, name, child
