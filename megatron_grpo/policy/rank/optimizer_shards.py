"""What a checkpoint holds of the distributed optimizer: from each rank its own part, cut along the parameters' rows.

Megatron-Core shards optimizer state as ranges of flat buffers, whose bounds depend on the layout. A range of a
parameter is a few boxes of the parameter: the end of a row, whole rows, the beginning of one. Under the parameter's
name and shape these are what Megatron-Core's "fully_reshardable" checkpoints hold, which any layout loads; but nobody
gathers anything: a rank writes, and asks for, the boxes of its own ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def shard_by_boxes(optimizer: Any) -> None:
    """Have an optimizer of Megatron-Core write and load "fully_reshardable" checkpoints box by box.

    Args:
        optimizer: what get_megatron_optimizer gave; optimizers that are not distributed hold whole parameters, and stay
            as they are.
    """
    for one in optimizer.chained_optimizers:
        if isinstance(one, DistributedOptimizer):
            one.sharded_param_state_fully_reshardable = MethodType(_own_state, one)
            one.load_parameter_state_from_fully_reshardable = MethodType(_set_own_state, one)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A range of a tensor's elements as boxes of the tensor.

    Args:
        shape: shape of the tensor, of at least one dimension.
        start, stop: the range, in the order in which elements lie in memory.

    Yields:
        (offset, size) of each box, in the order of the range; the elements of each are consecutive in it.
    """
    if len(shape) == 1:
        if start < stop:
            yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    whole, end = -(-start // row), stop // row
    if whole > end:  # within one row
        yield from _in_row(shape, end, start, stop)
        return
    yield from _in_row(shape, whole - 1, start, whole * row)
    if whole < end:
        yield (whole, *(0,) * (len(shape) - 1)), (end - whole, *shape[1:])
    yield from _in_row(shape, end, end * row, stop)


def _in_row(
    shape: Sequence[int], number: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes of a range that lies within a row; none if it is empty."""
    before = number * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - before, stop - before):
        yield (number, *offset), (1, *size)


def _own_state(
    self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Boxes of this rank's main weights and moments, by number of the parameter and name of the state."""
    found, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    of_parameter = {one.data: one for one in nested_values(found)}
    return {
        number: {
            name: list(_boxes_of(of_parameter[parameter], f"optimizer.state.{name}", state, start, stop))
            for name, state in self._get_main_param_and_optimizer_states(parameter).items()
            if name != "step"  # the same for all; it comes with the parameter groups
        }
        for number, (parameter, start, stop) in enumerate(_own_ranges(self))
    }


@torch.no_grad()
def _set_own_state(self: Any, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    """Put main weights and moments in their place that were loaded as `_own_state` asks for them."""
    for number, (parameter, _, _) in enumerate(_own_ranges(self)):
        state = {name: torch.cat([box.reshape(-1) for box in found]) for name, found in loaded[number].items()}
        self._set_main_param_and_optimizer_states(parameter, state)
    if isinstance(self.optimizer, HybridDeviceOptimizer):
        self.optimizer._sync_hdo_state_to_sub_optimizers()


def _own_ranges(optimizer: Any) -> Iterator[tuple[Tensor, int, int]]:
    """The parameters that this rank updates a part of, [...] each, with the range of their elements that it does."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _boxes_of(
    weight: ShardedTensor | ShardedTensorFactory, prefix: str, state: Tensor, start: int, stop: int
) -> Iterator[ShardedTensor]:
    """What a checkpoint holds of one kind of state of a range of a parameter.

    Args:
        weight: what it holds of the parameter; a factory where that is several tensors (gate and up projections).
        prefix: what the state's name in the checkpoint begins with.
        state: [stop - start]: the state, which the boxes share memory with.
        start, stop: the range of the parameter's elements.
    """
    parts: list[tuple[int, ShardedTensor]]
    if isinstance(weight, ShardedTensorFactory):
        # Of a tensor without memory, whose views say where in it they lie.
        place = torch.empty(weight.data.shape, dtype=state.dtype, device="meta")
        built = list(nested_values({"": weight.build_fn(weight.key, place, weight.replica_id, None)}))
        assert all(part.data.is_contiguous() for part in built), f"{weight.key} is cut otherwise than along its rows"
        parts = [(part.data.storage_offset(), part) for part in built]
    else:
        parts = [(0, weight)]
    for first, part in parts:
        begin, end = max(start, first), min(stop, first + math.prod(part.local_shape))
        if begin < end:
            piece = state[begin - start : end - start]
            yield from _boxes_of_part(part, f"{prefix}.{part.key}", piece, begin - first, end - first)


def _boxes_of_part(part: ShardedTensor, key: str, state: Tensor, start: int, stop: int) -> Iterator[ShardedTensor]:
    """Boxes of the range [start, stop) of what a rank holds of one tensor of the checkpoint."""
    shape = (*(1,) * part.prepend_axis_num, *part.local_shape)
    taken = 0
    for offset, size in boxes(shape, start, stop):
        numel = math.prod(size)
        yield ShardedTensor(
            key=key,
            data=state[taken : taken + numel].view(size),
            dtype=state.dtype,
            local_shape=size,
            global_shape=part.global_shape,
            global_offset=tuple(base + within for base, within in zip(part.global_offset, offset, strict=True)),
            axis_fragmentations=None,
            allow_shape_mismatch=part.allow_shape_mismatch,  # the padding of the vocabulary depends on the layout
            # Data-parallel ranks hold different boxes; equal ones are those of the ranks that hold equal weights.
            replica_id=(*part.replica_id[:2], 0),
        )
        taken += numel
