"""Runs on ranks of a model: loads a rank's shard from Hugging Face format, and gathers full tensors for export."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.models.megatron_names import list_layers, name_parameter
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_axes import LABELS, list_names, locate_sections, measure_axis
from megatron_grpo.models.weight_map import WeightEntry, WeightSlice, cut_sections, iter_entries


def merge_slices(entry: WeightEntry, parts: Sequence[Tensor], model: ModelShape, rows: int) -> Tensor:
    """Merge slices of Hugging Face tensors into a rank's parameter, [rows, ...].

    `parts`: slices in the order of `entry.list_slices`, each [rows or fewer, ...]; fewer only where the vocabulary is
    padded.
    """
    sizes = _find_local_sizes(entry, [part.shape for part in parts], model)
    if sizes is None:
        return torch.cat(list(parts))
    shape = [measure_axis(axis, sizes) for axis in entry.axes]
    merged = parts[0].new_zeros([rows, *shape[1:]] if entry.split == "vocab" else shape)
    targets = _view_sections(merged, entry.axes, sizes)
    for section, part in zip(cut_sections(entry), parts, strict=True):
        for names, values in _view_sections(part, section.axes, sizes).items():
            targets[names].copy_(values)
    return merged


def split_parameter(
    entry: WeightEntry, local: Tensor, slices: Sequence[WeightSlice], model: ModelShape
) -> list[Tensor]:
    """Split a rank's parameter into slices: the inverse of `merge_slices`.

    In its place may be an adapter's matrix with the parameter's rows and other columns.
    """
    sections = cut_sections(entry)
    if len(sections) == 1 and sections[0].axes == entry.axes:
        return [local[: slices[0].local_shape[0]]] if entry.split == "vocab" else [local]
    sizes = _find_local_sizes(entry, [part.local_shape for part in slices], model)
    if sizes is None:
        return list(local.split([part.local_shape[0] for part in slices]))
    sizes |= {axis: size for axis, size in zip(entry.axes[1:], local.shape[1:], strict=True) if axis in sizes}
    sources = _view_sections(local, entry.axes, sizes)
    parts = []
    for section in sections:
        shape = [measure_axis(axis, sizes) for axis in section.axes]
        text = " ".join(section.axes)
        if "|" not in text:  # a view where the layout allows it
            order = [name for name in list_names(text) if name not in LABELS]
            values = sources[frozenset(list_names(text)) - {"expert"}]
            parts.append(values.permute([sorted(order).index(name) for name in order]).reshape(shape))
            continue
        parts.append(local.new_empty(shape))
        for names, target in _view_sections(parts[-1], section.axes, sizes).items():
            target.copy_(sources[names])
    return parts


def view_slices(
    entry: WeightEntry, local: Tensor, slices: Sequence[WeightSlice], model: ModelShape
) -> list[list[Tensor]]:
    """View the slices' elements in a rank's parameter, without copies: views by slice."""
    sections = cut_sections(entry)
    if len(sections) == 1 and sections[0].axes == entry.axes:
        return [[local]]
    sizes = _find_local_sizes(entry, [part.local_shape for part in slices], model)
    if sizes is None:
        return [[part] for part in local.split([part.local_shape[0] for part in slices])]
    sources, views = _view_sections(local, entry.axes, sizes), []
    for section in sections:
        shape = [measure_axis(axis, sizes) for axis in section.axes]
        names = _view_sections(torch.empty(shape, device="meta"), section.axes, sizes)
        views.append([sources[part] for part in names])
    return views


def _find_local_sizes(entry: WeightEntry, shapes: Sequence[Sequence[int]], model: ModelShape) -> dict[str, int] | None:
    """Find sizes of a rank's part; None: it cuts a group."""
    # Megatron-Core interleaves by group: the queries of a key/value head, its key, its value, and so on, so that a cut
    # of the rows gives every tensor-parallel rank whole groups. Hugging Face keeps three separate matrices.
    sizes = model.sizes
    if entry.split is None:
        return sizes
    unit, sections = sizes | {entry.split: 1}, zip(cut_sections(entry), shapes, strict=True)
    counts = {divmod(shape[section.dimension], section.measure(unit)) for section, shape in sections}
    count, rest = counts.pop()
    return None if counts or rest else sizes | {entry.split: count}


def _view_sections(tensor: Tensor, axes: Sequence[str], sizes: Mapping[str, int]) -> dict[frozenset[str], Tensor]:
    """View the sections of a tensor, by the names in their axes.

    The dimensions of a view are the factors in the order of their names. The tensor may be longer than its axes say.
    """
    views = {}
    for parts in product(*(locate_sections(axis, sizes) for axis in axes)):
        located = list(zip(tensor.stride(), parts, strict=True))
        begin = tensor.storage_offset() + sum(row * stride for stride, (row, _) in located)
        factors = sorted((name, size, step * stride) for stride, (_, part) in located for name, size, step in part)
        shape = [size for name, size, _ in factors if name not in LABELS]
        strides = [stride for name, _, stride in factors if name not in LABELS]
        views[frozenset(name for name, _, _ in factors) - {"expert"}] = tensor.as_strided(shape, strides, begin)
    return views


_BUFFERS = (".expert_bias", ".layer_scalar")
_ADAPTER_PARAMETER = re.compile(r"(?:(.*)\.)?lora_[ab](\d*)")  # in a layer; behind it, the number of the local expert


def is_adapter_parameter(name: str) -> bool:
    """True for the name of an adapter's A or B."""
    return _ADAPTER_PARAMETER.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class BoundEntry:
    """A row of the weight map with this rank's parameter."""

    entry: WeightEntry
    layer: int  # number of the layer in the full model, from 0
    parameter: Tensor
    expert: int = 0  # index among the experts of this rank; also 0 for parameters outside experts
    adapted: Any = None  # the adapter of this weight (`trainer.model.lora.Adapter`), if any

    def compute_weight(self) -> Tensor:
        """Compute the weight that the model uses: adapter merged, FP8 dequantised."""
        return self.compute_base() if self.adapted is None else self.adapted.merge_weight()

    def compute_base(self) -> Tensor:
        """Compute the weight without its adapter: FP8 dequantised."""
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
    adapters = {match.groups() for name in parameters if (match := _ADAPTER_PARAMETER.fullmatch(name))}
    parameters = {name: parameter for name, parameter in parameters.items() if not is_adapter_parameter(name)}
    # Biases of expert selection and factors of layers have no gradient, so they are buffers.
    parameters |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(_BUFFERS)}
    experts = list_local_experts(model, shape)
    # A stage may lack parameters outside layers, such as the embedding; a chunk that is the full model may not, except
    # for the copy of a tied embedding.
    is_full_model = model.pre_process and model.post_process
    bound: list[BoundEntry] = []
    for entry, layer, local in iter_entries(build_weight_map(shape), shape, list_layers(model)):
        for expert in range(len(experts) if entry.per_expert else 1):
            names = [name.format(expert=expert) for name in name_parameter(local, entry.half, entry.name)]
            present = [name for name in names if name in parameters]
            is_required = entry.half is not None or (is_full_model and not entry.copy)
            assert present or not is_required, f"the model has no parameter {names} (layer {layer})"
            for name in present:
                module, _, last = name.rpartition(".")
                key, adapted = (module, last.removeprefix("weight")), None
                if key in adapters:
                    adapters.remove(key)
                    adapted = model.get_submodule(module).adapters[int(key[1] or 0)]
                bound.append(BoundEntry(entry, layer, parameters.pop(name), expert, adapted))
    unbound = sorted({*parameters, *(f"{module}.lora_a{number}" for module, number in adapters)})
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
    experts = list_local_experts(chunks[0], shape)
    for bound in bind_entries(chunks, shape):
        entry = bound.entry
        splitters = process_groups.expt_tp if entry.per_expert else process_groups.tp
        slices = entry.list_slices(shape, bound.layer, splitters.rank(), splitters.size(), experts[bound.expert])
        if entry.zero_if_absent and not any(reader.has(part.name) for part in slices):
            bound.parameter.zero_()
            continue
        parts = [reader.read(part) for part in slices]
        merged = merge_slices(entry, parts, shape, rows=bound.parameter.shape[0])
        assert merged.shape == bound.parameter.shape, (entry.name, merged.shape, bound.parameter.shape)
        bound.parameter.copy_(merged)
        if _is_quantised(bound.parameter):
            # The optimizer's float32 copy would start from the random initial values.
            quantised: Any = bound.parameter
            quantised._high_precision_init_val = merged.to(quantised.dtype)


def read_head_rows(shape: ModelShape, folder: str | Path, start: int, end: int) -> Tensor:
    """Read rows of a language model's head from a folder: [end - start, hidden]."""
    (entry,) = (entry for entry in build_weight_map(shape) if entry.name == "output_layer.weight")
    (head,) = entry.list_slices(shape, 0, 0, 1)
    return HFFolderReader(folder).read(replace(head, bounds=((start, end), *head.bounds[1:])))


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
    # A tensor of all experts is complete with the last expert of the rank.
    for _, bounds in groupby(
        bind_entries(chunks, shape),
        lambda bound: (bound.entry, bound.layer, None if bound.entry.is_stacked else bound.expert),
    ):
        names: list[str] = []
        tensors: dict[str, Tensor] = {}
        for bound in bounds:
            local = None if bound.entry.copy else value(bound)
            if local is not None:
                names += _gather_tensors(bound, local, chunks[0], shape, tensors)
        yield from ((name, tensors.get(name)) for name in dict.fromkeys(names))


def _gather_tensors(
    bound: BoundEntry, local: Tensor, model: Any, shape: ModelShape, tensors: dict[str, Tensor]
) -> list[str]:
    """Gather a parameter's tensors in `tensors` of the first rank; return names."""
    entry, names = bound.entry, []
    for expert, shards in _gather_parts(bound, local, model, shape, is_split=entry.axis is not None):
        names += entry.name_tensors(bound.layer, expert)
        if shards:
            join_shards(entry, bound.layer, shards, shape, expert, tensors)
    return names


def _gather_parts(
    bound: BoundEntry, local: Tensor, model: Any, shape: ModelShape, *, is_split: bool
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield an expert's number and its parts, for the experts of all ranks."""
    # Process groups of the ranks that together hold the row, that split one matrix, and that hold equal parts.
    process_groups, is_expert = model.pg_collection, bound.entry.per_expert
    holders, splitters, replicas = process_groups.tp, process_groups.tp, process_groups.dp_cp
    if is_expert:
        holders, splitters, replicas = process_groups.tp_ep, process_groups.expt_tp, process_groups.expt_dp
    # Replicated parameters are not sent at all. Among ranks that hold equal weights only the first sends.
    shards = _gather(local, holders, is_split=is_split or is_expert) if replicas.rank() == 0 else []
    size = splitters.size()
    for part in range(holders.size() // size):
        expert = part * len(list_local_experts(model, shape)) + bound.expert
        yield expert, shards[part * size : (part + 1) * size]


def join_shards(
    entry: WeightEntry,
    layer: int,
    shards: Sequence[Tensor],
    shape: ModelShape,
    expert: int = 0,
    tensors: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Join the parts of a parameter, or of an adapter's matrix, to full tensors.

    `shards` are by rank. `tensors`: by name, those that earlier experts began.
    """
    tensors = {} if tensors is None else tensors
    for rank, shard in enumerate(shards if entry.axis is not None else shards[:1]):
        slices = entry.list_slices(shape, layer, rank, len(shards), expert)
        for part, values in zip(slices, split_parameter(entry, shard, slices, shape), strict=True):
            is_cut = [index != slice(None) for index in part.region]
            if not any(is_cut):
                tensors[part.name] = values.contiguous()
                continue
            # Where the weight is not cut, an adapter's matrix may have another size.
            sizes = [part.shape[axis] if is_cut[axis] else size for axis, size in enumerate(values.shape)]
            tensor = tensors.get(part.name)
            if tensor is None:
                tensor = tensors[part.name] = values.new_empty(sizes)
            tensor[part.region] = values
    return tensors


@torch.no_grad()
def iter_adapter_tensors(
    chunks: Sequence[Any], shape: ModelShape, value: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Gather full matrices of a stage's adapters, as `iter_hf_tensors`.

    The Hugging Face matrices of one Megatron parameter share its A, which is yielded for each of them. Names are
    peft's, without its prefix. `value` maps a parameter to the tensor to export, in the same shape.
    """
    for bound in bind_entries(chunks, shape):
        for part, letter in (("lora_a", "A"), ("lora_b", "B")) if bound.adapted is not None else ():
            entry, is_split = bound.entry, bound.adapted.split_matrix == part
            local = value(getattr(bound.adapted, part))
            for expert, shards in _gather_parts(bound, local, chunks[0], shape, is_split=is_split):
                names, tensors = entry.name_tensors(bound.layer, expert), {}
                if shards and part == "lora_a" and not is_split:
                    tensors = dict.fromkeys(names, shards[0])
                elif shards:
                    tensors = join_shards(entry, bound.layer, shards if is_split else shards[:1], shape, expert)
                for name in names:
                    yield f"{name.removesuffix('.weight')}.lora_{letter}.weight", tensors.get(name)


def list_local_experts(model: Any, shape: ModelShape) -> range:
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
