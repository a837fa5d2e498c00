"""Gathering parts of unequal length, which gloo refuses: ranks that split an expert's matrices hold as they come."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MODULE = "megatron.core.tensor_parallel.mappings"


def allow_uneven_parts() -> None:
    """Have Megatron-Core gather and scatter unequal parts by adding up whole tensors, each rank's part in its place."""
    mappings: Any = importlib.import_module(MODULE)
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(input_: Tensor, group: Any, output_split_sizes: Any = None, *rest: Any, **keywords: Any) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            even: Tensor = gather(input_, group, output_split_sizes, *rest, **keywords)
            return even
        whole = input_.new_zeros(sum(output_split_sizes), *input_.shape[1:])
        whole.split(list(output_split_sizes))[group.rank()].copy_(input_)
        dist.all_reduce(whole, group=group)
        return whole

    def scatter_parts(input_: Tensor, group: Any, input_split_sizes: Any = None, *rest: Any, **keywords: Any) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            even: Tensor = scatter(input_, group, input_split_sizes, *rest, **keywords)
            return even
        whole = input_.contiguous().clone()
        dist.all_reduce(whole, group=group)
        return torch.split(whole, list(input_split_sizes))[group.rank()].clone()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts
