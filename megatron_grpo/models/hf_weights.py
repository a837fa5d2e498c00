"""Runs on ranks of a model: loads a rank's shard from Hugging Face format, and gathers full tensors for export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry, WeightSlice, count_group_rows, is_per_layer, iter_entries


def merge_slices(entry: WeightEntry, parts: list[Tensor], model: ModelShape, rows: int) -> Tensor:
    """Merge slices of Hugging Face tensors into a rank's parameter, [rows, ...].

    `parts`: slices in the order of `entry.hf`, each [rows or fewer, ...]; fewer only where the vocabulary is padded.
    """
    # Megatron-Core interleaves by group: the queries of a key/value head, its key, its value, and so on, so that a cut
    # of the rows gives every tensor-parallel rank whole groups. Hugging Face keeps three separate matrices.
    if entry.merge == "qkv" and sum(map(len, parts)) >= sum(count_group_rows(model)):
        widths = count_group_rows(model)
        group_parts = [part.view(-1, width, *part.shape[1:]) for part, width in zip(parts, widths, strict=True)]
        return torch.cat(group_parts, dim=1).flatten(0, 1)
    if entry.merge in ("qkv", "gate_up"):  # qkv: the rank has rows of one key/value head's group alone
        return torch.cat(parts)
    if entry.merge == "vocab":
        return torch.cat([parts[0], parts[0].new_zeros(rows - len(parts[0]), *parts[0].shape[1:])])
    return parts[0]


def split_parameter(entry: WeightEntry, local: Tensor, slices: list[WeightSlice], model: ModelShape) -> list[Tensor]:
    """Split a rank's parameter into slices: the inverse of `merge_slices`."""
    if entry.merge == "qkv" and len(local) < sum(count_group_rows(model)):
        return list(local.split([part.stop - part.start for part in slices]))
    if entry.merge == "qkv":
        widths = count_group_rows(model)
        grouped = local.view(-1, sum(widths), *local.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(widths, dim=1)]
    if entry.merge == "gate_up":
        return list(local.chunk(2))
    if entry.merge == "vocab":
        return [local[: slices[0].stop - slices[0].start]]
    return [local]


ADAPTER_PARAMETERS = ("lora_a", "lora_b")  # in their layer


class AdaptedLayer(Protocol):
    """A linear layer with an adapter: a module that owns ADAPTER_PARAMETERS.

    `trainer.model.lora.AdaptedLinear` is one.
    """

    lora_a: Tensor  # [rank, columns]
    lora_b: Tensor  # [rows, rank], the rows in the order of the weight's
    split_matrix: str
    """Name of the matrix that tensor parallelism splits: lora_b with the layer's rows, lora_a with its columns."""

    def merge_weight(self) -> Tensor:
        """Compute this rank's weight plus the adapter's product: [rows, columns]."""


@dataclass(frozen=True, slots=True)
class BoundEntry:
    """A row of the weight map with this rank's parameter."""

    entry: WeightEntry
    layer: int  # number of the layer in the full model, from 0
    parameter: Tensor
    expert: int = 0  # index among the experts of this rank; also 0 for parameters outside experts
    adapted: AdaptedLayer | None = None  # the layer that the parameter is the weight of, if it has an adapter

    def compute_weight(self) -> Tensor:
        """Compute the weight that the model uses: adapter merged, FP8 dequantised."""
        if self.adapted is not None:
            return self.adapted.merge_weight()
        weight = self.parameter.detach()
        return weight.dequantize() if _is_quantised(weight) else weight


def bind_entries(chunks: Sequence[Any], shape: ModelShape) -> list[BoundEntry]:
    """Bind every parameter of a rank's unwrapped GPTModels to its map row.

    An adapter belongs to the weight of its layer. AssertionError: the map lacks a parameter or adapter, or the model
    one.
    """
    return [bound for chunk in chunks for bound in _bind_chunk(chunk, shape)]


def _bind_chunk(model: Any, shape: ModelShape) -> list[BoundEntry]:
    parameters = dict(model.named_parameters())
    # Layers with adapters are found by the names of their parameters, not by isinstance() of a runtime-checkable
    # protocol: since Python 3.12 that looks attributes up statically, and torch keeps parameters in a dictionary.
    adapter_names = [name for name in parameters if name.rpartition(".")[2] in ADAPTER_PARAMETERS]
    adapters = {name.rpartition(".")[0] for name in adapter_names}
    for name in adapter_names:
        del parameters[name]
    # Biases of expert selection have no gradient, so they are buffers.
    parameters |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(".expert_bias")}
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    experts = _list_rank_experts(model, shape)
    # A stage may lack parameters outside layers, such as the embedding; a chunk that is the full model may not, except
    # for the copy of a tied embedding.
    is_full_model = model.pre_process and model.post_process
    bound: list[BoundEntry] = []
    for entry, layer, local in iter_entries(build_weight_map(shape), shape, layers):
        for expert in range(len(experts) if entry.per_expert else 1):
            names = [name.format(layer=local, expert=expert) for name in entry.megatron]
            present = [name for name in names if name in parameters]
            is_required = is_per_layer(entry.megatron[0]) or (is_full_model and not entry.copy)
            assert present or not is_required, f"the model has no parameter {names} (layer {layer})"
            for name in present:
                module, _, last = name.rpartition(".")
                adapted = None
                if last == "weight" and module in adapters:
                    adapters.remove(module)
                    adapted = model.get_submodule(module)
                bound.append(BoundEntry(entry, layer, parameters.pop(name), expert, adapted))
    unbound = sorted({*parameters, *adapters})
    assert not unbound, f"the weight map of {shape.family} does not know {unbound}"
    return bound


def _is_quantised(parameter: Tensor) -> bool:
    # Imported here because the driver imports this module too, and does not need Megatron.
    from megatron.core.fp8_utils import is_float8tensor

    return bool(is_float8tensor(parameter))


@torch.no_grad()
def load_hf_weights(chunks: Sequence[Any], shape: ModelShape, folder: str | Path) -> None:
    """Fill the parameters of a rank's unwrapped GPTModels from a folder.

    Raises:
        ValueError: a file or tensor is missing, damaged, not finite or of another shape than config.json implies.
    """
    reader, process_groups = HFFolderReader(folder), chunks[0].pg_collection
    experts = _list_rank_experts(chunks[0], shape)
    for bound in bind_entries(chunks, shape):
        entry = bound.entry
        splitters = process_groups.expt_tp if entry.per_expert else process_groups.tp
        slices = entry.list_slices(shape, bound.layer, splitters.rank(), splitters.size(), experts[bound.expert])
        if entry.zero_if_absent and not any(reader.has(part.name) for part in slices):
            bound.parameter.zero_()
            continue
        parts = [reader.read(part) for part in slices]
        merged = merge_slices(entry, parts, shape, rows=bound.parameter.shape[0])
        assert merged.shape == bound.parameter.shape, (entry.megatron, merged.shape, bound.parameter.shape)
        bound.parameter.copy_(merged)
        if _is_quantised(bound.parameter):
            # The optimizer's float32 copy would start from the random initial values.
            quantised: Any = bound.parameter
            quantised._high_precision_init_val = merged.to(quantised.dtype)


@torch.no_grad()
def iter_hf_tensors(
    chunks: Sequence[Any], shape: ModelShape, value: Callable[[BoundEntry], Tensor | None] = BoundEntry.compute_weight
) -> Iterator[tuple[str, Tensor | None]]:
    """Gather full Hugging Face tensors of a pipeline stage, which is collective.

    `chunks` are the rank's unwrapped GPTModels; `value` maps a parameter to the tensor to export, or to None.

    Yields:
        (name, tensor) on the first rank of the stage, (name, None) on the others, in the order of the weight map.
        Tensors are contiguous, in the value's dtype, and may share memory with the model.
    """
    process_groups, rank_experts = chunks[0].pg_collection, len(_list_rank_experts(chunks[0], shape))
    for bound in bind_entries(chunks, shape):
        local = None if bound.entry.copy else value(bound)
        if local is None:
            continue
        # Process groups of the ranks that together hold the row, that split one matrix, and that hold equal parts.
        holders, splitters, replicas = process_groups.tp, process_groups.tp, process_groups.dp_cp
        if bound.entry.per_expert:
            holders, splitters, replicas = process_groups.tp_ep, process_groups.expt_tp, process_groups.expt_dp
        # Replicated parameters are not sent at all. Among ranks that hold equal weights only the first sends.
        size, is_split = splitters.size(), bound.entry.axis is not None or bound.entry.per_expert
        shards = _gather(local, holders, is_split=is_split) if replicas.rank() == 0 else []
        for part in range(holders.size() // size):
            expert = part * rank_experts + bound.expert
            names = [tensor.name for tensor in bound.entry.list_slices(shape, bound.layer, 0, 1, expert)]
            if shards:
                yield from zip(names, _join_shards(bound, shards[part * size : (part + 1) * size], shape), strict=True)
            else:
                yield from ((name, None) for name in names)


@torch.no_grad()
def iter_adapter_tensors(
    chunks: Sequence[Any], shape: ModelShape, value: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Gather full matrices of a stage's adapters, as `iter_hf_tensors`.

    The Hugging Face matrices of one Megatron parameter share its A, which is yielded for each of them. Names are
    peft's, without its prefix. `value` maps a parameter to the tensor to export, in the same shape.
    """
    process_groups = chunks[0].pg_collection
    for bound in bind_entries(chunks, shape):
        if bound.adapted is None:
            continue
        names = [tensor.name.removesuffix(".weight") for tensor in bound.entry.list_slices(shape, bound.layer, 0, 1)]
        for part, letter in (("lora_a", "A"), ("lora_b", "B")):
            is_split = bound.adapted.split_matrix == part
            local = value(getattr(bound.adapted, part))
            shards = _gather(local, process_groups.tp, is_split=is_split) if process_groups.dp_cp.rank() == 0 else []
            tensors: list[Tensor | None] = [None] * len(names)
            if shards and part == "lora_a" and not is_split:
                tensors = [local] * len(names)
            elif shards:
                tensors = [*_join_shards(bound, shards if is_split else [local], shape)]
            yield from zip((f"{name}.lora_{letter}.weight" for name in names), tensors, strict=True)


def _list_rank_experts(model: Any, shape: ModelShape) -> range:
    """List this rank's experts in every layer; range(1) without experts."""
    if shape.experts is None:
        return range(1)
    group = model.pg_collection.ep
    count = shape.experts.count // group.size()
    return range(group.rank() * count, (group.rank() + 1) * count)


def _gather(local: Tensor, group: dist.ProcessGroup, *, is_split: bool) -> list[Tensor]:
    """Gather a parameter's parts, or equal copies, on the first rank."""
    local, is_first = local.contiguous(), group.rank() == 0
    if group.size() == 1 or not is_split:
        return [local] * group.size() if is_first else []
    received = [torch.empty_like(local) for _ in range(group.size())] if is_first else []
    dist.gather(local, received or None, group=group, group_dst=0)
    return received


def _join_shards(bound: BoundEntry, shards: list[Tensor], shape: ModelShape) -> list[Tensor]:
    entry, size = bound.entry, len(shards)
    if entry.axis is None:
        return [shards[0]]
    parts = [
        split_parameter(entry, shard, entry.list_slices(shape, bound.layer, rank, size), shape)
        for rank, shard in enumerate(shards)
    ]
    if size == 1:
        return [part.contiguous() for part in parts[0]]
    return [torch.cat(tensor_parts, dim=entry.axis) for tensor_parts in zip(*parts, strict=True)]
