"""Weights between a Megatron model and Hugging Face format: loading a rank's shard, and giving out full tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.models.families import weight_entries
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.models.merge import merge_slices, split_parameter
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry, global_entries, is_per_layer


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a receiver has to know of a tensor before it arrives."""

    name: str
    dtype: str
    """Name of the dtype without the "torch.": "float32"."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoundEntry:
    """An entry of the table together with the parameter of this rank that it describes."""

    entry: WeightEntry
    layer: int
    """Number of the layer in the whole model, from 0."""
    parameter: Tensor


def bound_entries(model: Any, shape: ModelShape) -> list[BoundEntry]:
    """Every parameter of this rank's pipeline stage with its entry, in the order of the table.

    Args:
        model: an unwrapped Megatron GPTModel.
    """
    parameters = dict(model.named_parameters())
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    bound: list[BoundEntry] = []
    for entry, layer, local in global_entries(weight_entries(shape), layers):
        names = [name for name in (n.format(layer=local) for n in entry.megatron) if name in parameters]
        assert names or not is_per_layer(entry.megatron[0]), (
            f"the model has no parameter {entry.megatron} in layer {layer}"
        )
        bound.extend(BoundEntry(entry, layer, parameters.pop(name)) for name in names)
    assert not parameters, f"the weight map of {shape.family} does not know {sorted(parameters)}"
    return bound


@torch.no_grad()
def load_hf_weights(model: Any, shape: ModelShape, folder: str | Path) -> None:
    """Fill this rank's parameters from a folder in Hugging Face format, reading only the slices that it holds.

    Args:
        model: an unwrapped Megatron GPTModel; values are converted to its dtype.

    Raises:
        ValueError: a file or tensor is missing, damaged or of another shape than config.json implies.
    """
    reader = HFFolderReader(folder)
    rank, size = model.pg_collection.tp.rank(), model.pg_collection.tp.size()
    for bound in bound_entries(model, shape):
        slices = bound.entry.slices(shape, bound.layer, rank, size)
        if bound.entry.zero_if_absent and not any(reader.has(wanted.name) for wanted in slices):
            bound.parameter.zero_()
            continue
        parts = [reader.read(wanted) for wanted in slices]
        merged = merge_slices(bound.entry, parts, shape, rows=bound.parameter.shape[0])
        assert merged.shape == bound.parameter.shape, (bound.entry.megatron, merged.shape, bound.parameter.shape)
        bound.parameter.copy_(merged)


def hf_specs(model: Any, shape: ModelShape) -> list[TensorSpec]:
    """The full tensors that `iter_hf_tensors` gives on this pipeline stage, in its order; needs no communication."""
    return [
        TensorSpec(part.name, str(bound.parameter.dtype).removeprefix("torch."), part.shape)
        for bound in _exported(model, shape)
        for part in bound.entry.slices(shape, bound.layer, 0, 1)
    ]


@torch.no_grad()
def iter_hf_tensors(model: Any, shape: ModelShape, gather_bytes: int) -> Iterator[tuple[str, Tensor | None]]:
    """Full Hugging Face tensors [...] of a pipeline stage; collective within the tensor-parallel group.

    Local shards of consecutive parameters are packed, so that one collective moves up to `gather_bytes` (or a single
    parameter that is larger). Replicated parameters are not sent at all.

    Yields:
        (name, tensor) on tensor-parallel rank 0, (name, None) on the others, in the order of `hf_specs`. Tensors are
        contiguous, in the parameter's dtype, and may share memory with the model.
    """
    group = model.pg_collection.tp
    rank, size = group.rank(), group.size()
    for bucket in _buckets(_exported(model, shape), size, gather_bytes):
        shards = _gather_bucket(bucket, group)
        for position, bound in enumerate(bucket):
            names = [part.name for part in bound.entry.slices(shape, bound.layer, 0, 1)]
            if rank != 0:
                yield from ((name, None) for name in names)
                continue
            yield from zip(names, _full_tensors(bound, [shard[position] for shard in shards], shape), strict=True)


def _exported(model: Any, shape: ModelShape) -> list[BoundEntry]:
    return [bound for bound in bound_entries(model, shape) if not bound.entry.copy]


def _buckets(entries: list[BoundEntry], tp_size: int, gather_bytes: int) -> Iterator[list[BoundEntry]]:
    """Consecutive entries whose gathered shards fit into `gather_bytes` and have one dtype."""
    bucket: list[BoundEntry] = []
    used = 0
    for bound in entries:
        cost = 0 if bound.entry.axis is None else bound.parameter.nbytes * tp_size
        if bucket and (used + cost > gather_bytes or bound.parameter.dtype != bucket[0].parameter.dtype):
            yield bucket
            bucket, used = [], 0
        bucket.append(bound)
        used += cost
    if bucket:
        yield bucket


def _gather_bucket(bucket: list[BoundEntry], group: dist.ProcessGroup) -> list[list[Tensor]]:
    """By tensor-parallel rank, its parameters [...] in a bucket, all of one dtype; empty on ranks other than 0."""
    own = [bound.parameter.detach() for bound in bucket]
    split = [position for position, bound in enumerate(bucket) if bound.entry.axis is not None]
    if group.size() == 1 or not split:
        return [own]
    packed = torch.cat([own[position].reshape(-1) for position in split])
    if group.rank() != 0:
        dist.gather(packed, group=group, group_dst=0)
        return []
    received = [torch.empty_like(packed) for _ in range(group.size())]
    dist.gather(packed, received, group=group, group_dst=0)
    shards = []
    for flat in received:
        shard = list(own)
        pieces = flat.split([own[position].numel() for position in split])
        for position, piece in zip(split, pieces, strict=True):
            shard[position] = piece.view_as(own[position])
        shards.append(shard)
    return shards


def _full_tensors(bound: BoundEntry, shards: list[Tensor], shape: ModelShape) -> list[Tensor]:
    """One parameter of every rank, [...] in one dtype, to the full Hugging Face tensors that it is made of."""
    entry, size = bound.entry, len(shards)
    if entry.axis is None:
        return [shards[0]]
    parts = [
        split_parameter(entry, shard, entry.slices(shape, bound.layer, rank, size), shape)
        for rank, shard in enumerate(shards)
    ]
    if size == 1:
        return [part.contiguous() for part in parts[0]]
    return [torch.cat(of_tensor, dim=entry.axis) for of_tensor in zip(*parts, strict=True)]
