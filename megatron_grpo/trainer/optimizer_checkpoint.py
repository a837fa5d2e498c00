"""Optimizer state in checkpoints of any layout: each rank writes the boxes of the weights that it updates."""

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


def save_by_boxes(optimizer: Any) -> None:
    """Make Megatron-Core's distributed optimizers save and load "fully_reshardable" state by boxes.

    A distributed optimizer cuts the flat buffer of all parameters into equal ranges, one per data-parallel rank, so a
    rank owns the main weights and moments of a range of elements that begins and ends anywhere within a parameter. A
    checkpoint that any layout can load must name elements by parameter and coordinate. Megatron-Core's own way gathers
    each parameter's whole state on data-parallel rank 0, which writes all of it: the memory and time of one rank grow
    with the model. Here every rank writes its own range. A range of a tensor's elements in memory order is not one box
    of the tensor, but a few: the end of its first row, the whole rows between, the beginning of its last row, and so on
    within a row (`split_into_boxes`). Boxes become sharded tensors under the parameter's name, which loading reads and
    concatenates in the same order in every layout. Other optimizers are not changed.
    """
    for chained in optimizer.chained_optimizers:
        if isinstance(chained, DistributedOptimizer):
            chained.sharded_param_state_fully_reshardable = MethodType(_build_sharded_state, chained)
            chained.load_parameter_state_from_fully_reshardable = MethodType(_load_sharded_state, chained)


def split_into_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a range of a tensor's elements into consecutive boxes (offset, size)."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while start < stop:
        # The outermost dimension with a slice that begins here and fits; as many such slices as fit in the dimension.
        axis = next(a for a, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop)
        offset = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        slices = min((stop - start) // strides[axis], shape[axis] - offset[axis])
        yield offset, (*(1,) * axis, slices, *shape[axis + 1 :])
        start += slices * strides[axis]


def iter_updated_ranges(optimizer: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Iterate over (parameter, start, stop) of the elements that this rank updates."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _build_sharded_state(
    self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    # Boxes by parameter index and name of the state.
    build_sharded_weights, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    weight_of = {weight.data: weight for weight in nested_values(build_sharded_weights)}
    return {
        index: {
            name: list(_build_boxes(weight_of[parameter], f"optimizer.state.{name}", state, start, stop))
            for name, state in self._get_main_param_and_optimizer_states(parameter).items()
            if name != "step"  # stored once, with the parameter groups
        }
        for index, (parameter, start, stop) in enumerate(iter_updated_ranges(self))
    }


@torch.no_grad()
def _load_sharded_state(self: Any, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    for index, (parameter, _, _) in enumerate(iter_updated_ranges(self)):
        state = {name: torch.cat([box.reshape(-1) for box in boxes]) for name, boxes in loaded[index].items()}
        self._set_main_param_and_optimizer_states(parameter, state)
    if isinstance(self.optimizer, HybridDeviceOptimizer):
        self.optimizer._sync_hdo_state_to_sub_optimizers()


def _build_boxes(
    weight: ShardedTensor | ShardedTensorFactory, prefix: str, state: Tensor, start: int, stop: int
) -> Iterator[ShardedTensor]:
    # Entries of one state of a parameter's range, which share the state's memory.
    parts: list[tuple[int, ShardedTensor]]
    if isinstance(weight, ShardedTensorFactory):  # stored as several tensors (gate and up projections)
        # Built from a tensor on the meta device: storage offsets of the views say which elements they hold.
        meta = torch.empty(weight.data.shape, dtype=state.dtype, device="meta")
        built = list(nested_values({"": weight.build_fn(weight.key, meta, weight.replica_id, None)}))
        assert all(part.data.is_contiguous() for part in built), f"{weight.key} is cut otherwise than along its rows"
        parts = [(part.data.storage_offset(), part) for part in built]
    else:
        parts = [(0, weight)]
    for first, part in parts:
        begin, end = max(start, first), min(stop, first + math.prod(part.local_shape))
        position = begin - start
        shape = (*(1,) * part.prepend_axis_num, *part.local_shape)
        for offset, size in split_into_boxes(shape, begin - first, end - first):
            numel = math.prod(size)
            yield ShardedTensor(
                key=f"{prefix}.{part.key}",
                data=state[position : position + numel].view(size),
                dtype=state.dtype,
                local_shape=size,
                global_shape=part.global_shape,
                global_offset=tuple(base + within for base, within in zip(part.global_offset, offset, strict=True)),
                axis_fragmentations=None,
                allow_shape_mismatch=part.allow_shape_mismatch,  # the padding of the vocabulary depends on the layout
                # Data-parallel ranks hold different boxes, so only replicas of the weights count as replicas here.
                replica_id=(*part.replica_id[:2], 0),
            )
            position += numel
