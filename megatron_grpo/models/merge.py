"""From slices of Hugging Face tensors to the parameter that they make up, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry, WeightSlice, group_rows


def merge_slices(entry: WeightEntry, parts: list[Tensor], model: ModelShape, rows: int) -> Tensor:
    """A rank's parameter from the slices of the Hugging Face tensors that it is made of.

    Args:
        entry: row of the weight map, which says how the slices are merged.
        parts: slices in the order of `entry.hf`, each [rows or fewer, ...], all of one dtype.
        model: sizes of the model.
        rows: rows of the parameter; more than the slice has only where the vocabulary is padded.

    Returns:
        [rows, ...] as Megatron-Core lays the parameter out, the dtype of the slices.
    """
    # Megatron-Core interleaves by group: the queries of a key/value head, its key, its value, and so on, so that a cut
    # of the rows gives every tensor-parallel rank whole groups. Hugging Face keeps three separate matrices.
    if entry.merge == "qkv" and sum(map(len, parts)) >= sum(group_rows(model)):
        widths = group_rows(model)
        group_parts = [part.view(-1, width, *part.shape[1:]) for part, width in zip(parts, widths, strict=True)]
        return torch.cat(group_parts, dim=1).flatten(0, 1)
    if entry.merge == "qkv":  # a piece of one group
        return torch.cat(parts)
    if entry.merge == "gate_up":
        return torch.cat(parts)
    if entry.merge == "vocab":
        return torch.cat([parts[0], parts[0].new_zeros(rows - len(parts[0]), *parts[0].shape[1:])])
    return parts[0]


def split_parameter(entry: WeightEntry, local: Tensor, slices: list[WeightSlice], model: ModelShape) -> list[Tensor]:
    """The inverse of `merge_slices`: a rank's parameter [rows, ...] to slices in the order of `entry.hf`, in its dtype.

    The slices are contiguous and may share memory with `local`.
    """
    if entry.merge == "qkv" and len(local) < sum(group_rows(model)):
        return list(local.split([wanted.stop - wanted.start for wanted in slices]))
    if entry.merge == "qkv":
        widths = group_rows(model)
        grouped = local.view(-1, sum(widths), *local.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(widths, dim=1)]
    if entry.merge == "gate_up":
        return list(local.chunk(2))
    if entry.merge == "vocab":
        return [local[: slices[0].stop - slices[0].start]]
    return [local]
