"""Experts of the form that they have on a GPU, with numbers on a CPU: one layer has the matrices of all of a rank's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from torch import Tensor

from megatron_grpo.planning.dry.stand_in_layers import ShapedGroupedLinear
from megatron_grpo.trainer.model import layer_spec


class PlainGroupedLinear(ShapedGroupedLinear):
    """A product for each expert, with the names and marks of Transformer Engine's parameters."""

    def forward(self, hidden: Tensor, tokens_of_experts: Sequence[int]) -> tuple[Tensor, None]:
        parts = enumerate(hidden.split(list(tokens_of_experts)))
        return torch.cat([F.linear(part, getattr(self, f"weight{number}")) for number, part in parts]), None


class GroupedModules(layer_spec.TorchModules):
    """Modules of layers, with experts as Transformer Engine has them."""

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        column, row = (partial(PlainGroupedLinear, split_axis=axis) for axis in (0, 1))
        return partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(linear_fc1=column, linear_fc2=row))


@contextmanager
def use_grouped_experts(is_grouped: bool = True) -> Iterator[None]:
    """Let models be built with such experts, if `is_grouped`, until the end."""
    original = layer_spec.TorchModules
    if is_grouped:
        layer_spec.TorchModules = GroupedModules  # type: ignore[misc]
    try:
        yield
    finally:
        layer_spec.TorchModules = original  # type: ignore[misc]
