"""The weight map: which Megatron parameter holds which Hugging Face tensors, and how ranks split them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import NamedTuple, cast

from megatron_grpo.models.megatron_names import Half
from megatron_grpo.models.shape import LayerKind, ModelShape
from megatron_grpo.models.weight_axes import list_names, measure_axis, split_sections

_MLP_KINDS = ("mlp", "dense", "experts", "single_experts", "packed_experts", "latent_experts")
# Factors that tensor parallelism splits; a parameter has at most one of them.
_SPLIT = {"vocab", "groups", "global_groups", "heads", "key_heads", "mamba_groups", "ffn", "expert_ffn", "shared_ffn"}


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of the Hugging Face model."""

    name: str  # with `{layer}` where the number of the layer goes, and perhaps `{expert}`
    dims: tuple[str, ...]  # axes as in `weight_axes`

    def measure(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Compute the shape; `sizes` are `ModelShape.sizes`."""
        return tuple(sizes["experts"] if dim == "expert" else measure_axis(dim, sizes) for dim in self.dims)


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A box of a full Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]  # of the full tensor
    bounds: tuple[tuple[int, int], ...]  # [begin, end) in each dimension

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.bounds)

    @property
    def region(self) -> tuple[slice, ...]:
        """Index of the box in the full tensor."""
        bounds = zip(self.bounds, self.shape, strict=True)
        return tuple(slice(None) if bound == (0, size) else slice(*bound) for bound, size in bounds)


class CutSection(NamedTuple):
    """A section of a tensor that tensor parallelism cuts on its own."""

    tensor: HFTensor
    dimension: int  # with several sections, or that is cut
    axes: tuple[str, ...]  # of the tensor, but of this section alone
    before: tuple[str, ...]  # sections before this one in the dimension

    def measure(self, sizes: Mapping[str, int]) -> int:
        """Measure the section in its dimension."""
        return measure_axis(self.axes[self.dimension], sizes)


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A Megatron parameter and the Hugging Face tensors merged in it."""

    name: str  # in Megatron-Core's layer or, outside layers, in the model; `{expert}` in that of an expert
    axes: tuple[str, ...]  # of the parameter, as in `weight_axes`
    hf: tuple[HFTensor, ...]
    copy: bool = False
    """Whether the parameter is a second copy of another entry's tensors (tied embeddings): loaded, but not exported."""
    zero_if_absent: bool = False  # a folder may lack these tensors, which then start at zero
    kind: LayerKind | None = None  # of the layers with the parameter; None: it is outside layers

    @property
    def half(self) -> Half | None:
        """Half of the layer with the parameter; None: it is outside layers."""
        if self.kind is None:
            return None
        return "mlp" if self.kind in _MLP_KINDS else "mixer"

    @property
    def split(self) -> str | None:
        """Factor that tensor parallelism splits; None: every rank has all."""
        return _find_split(self.axes)[1]

    @property
    def axis(self) -> int | None:
        """Dimension of the parameter that tensor parallelism splits."""
        return _find_split(self.axes)[0]

    @property
    def per_expert(self) -> bool:
        """Whether every expert has a parameter of its own."""
        return "{expert}" in self.name

    @property
    def is_stacked(self) -> bool:
        """Whether a Hugging Face tensor holds this parameter of all experts."""
        return "expert" in self.hf[0].dims

    def name_tensors(self, layer: int, expert: int = 0) -> list[str]:
        return [tensor.name.format(layer=layer, expert=expert) for tensor in self.hf]

    def list_slices(self, model: ModelShape, layer: int, rank: int, size: int, expert: int = 0) -> list[WeightSlice]:
        """List the boxes of tensors that a rank holds: one a section.

        `rank` of `size` is the rank's number in its tensor-parallel group or, for experts, in its expert-tensor group.
        """
        slices = []
        for section, shape, bounds in _compute_boxes(self, tuple(model.sizes.items()), rank, size):
            dims = zip(section.tensor.dims, bounds, strict=True)
            local = tuple((expert, expert + 1) if dim == "expert" else bound for dim, bound in dims)
            slices.append(WeightSlice(section.tensor.name.format(layer=layer, expert=expert), shape, local))
        return slices


@cache
def _find_split(axes: tuple[str, ...]) -> tuple[int | None, str | None]:
    names = ((axis, name) for axis, text in enumerate(axes) for name in list_names(text) if name in _SPLIT)
    return next(names, (None, None))


@cache
def cut_sections(entry: WeightEntry) -> tuple[CutSection, ...]:
    """List the sections of an entry's tensors."""
    sections: list[CutSection] = []
    for tensor in entry.hf:
        split = [dimension for dimension, text in enumerate(tensor.dims) if entry.split in list_names(text)]
        several = [dimension for dimension, text in enumerate(tensor.dims) if len(split_sections(text)) > 1]
        dimension = [*split, *several, 0][0]
        texts = split_sections(tensor.dims[dimension])
        for position, text in enumerate(texts):
            axes = (*tensor.dims[:dimension], text, *tensor.dims[dimension + 1 :])
            sections.append(CutSection(tensor, dimension, axes, tuple(texts[:position])))
    return tuple(sections)


@cache
def _compute_boxes(
    entry: WeightEntry, sizes: tuple[tuple[str, int], ...], rank: int, size: int
) -> list[tuple[CutSection, tuple[int, ...], list[tuple[int, int]]]]:
    """Compute the full shape of each section's tensor, and the rank's bounds in it."""
    by_name, boxes = dict(sizes), []
    for index, section in enumerate(cut_sections(entry)):
        shape = section.tensor.measure(by_name)
        bounds = [(0, length) for length in shape]
        before = sum(measure_axis(text, by_name) for text in section.before)
        begin, end = _find_range(entry, index, by_name, rank, size)
        bounds[section.dimension] = before + begin, before + end
        boxes.append((section, shape, bounds))
    return boxes


def _find_range(entry: WeightEntry, index: int, sizes: Mapping[str, int], rank: int, size: int) -> tuple[int, int]:
    """Find a rank's range within a section."""
    lengths = [section.measure(sizes) for section in cut_sections(entry)]
    total = lengths[index]
    if entry.split is None:
        return 0, total
    if entry.split == "vocab":  # padded at its end: the last ranks may hold fewer entries, or none
        width = -(-total // size)
        return min(rank * width, total), min((rank + 1) * width, total)
    count = sizes[entry.split]
    if size <= count:
        return rank * (total // size), (rank + 1) * (total // size)
    # The merged rows are cut evenly, through the middle of a group: a rank has some rows of one group, which may be
    # queries, its key or its value.
    is_simple = not any("|" in axis for section in cut_sections(entry) for axis in section.axes)
    assert is_simple, f"{entry.name}: {size} ranks cannot share {count} {entry.split}"
    widths = [length // count for length in lengths]
    pieces = size // count
    group, piece = divmod(rank, pieces)
    rows = sum(widths) // pieces
    first = sum(widths[:index])
    inside = [min(max(end - first, 0), widths[index]) for end in (piece * rows, (piece + 1) * rows)]
    return group * widths[index] + inside[0], group * widths[index] + inside[1]


def map_rows(table: str) -> Iterator[WeightEntry]:
    """Read the rows of a table.

    A row is `kind: parameter [axes] = tensor [axes] + tensor [axes] ...`, over as many lines as it takes. For instance

        dense: mlp.linear_fc1.weight [gate * ffn | up * ffn, hidden]
            = mlp.gate_proj.weight [gate * ffn, hidden] + mlp.up_proj.weight [up * ffn, hidden]

    Layers of the kind `dense` have this parameter (its name in the torch layers), which holds both tensors, rows of the
    first before those of the second. Names of tensors follow "model.layers.{layer}."; axes default to the parameter's.
    """
    for line in filter(str.strip, re.sub(r"\s*\n\s*([=+[])", r" \1", table).splitlines()):
        row, tensors = line.split(" = ")
        kind, parameter = row.strip().split(": ")
        name, axes = _split_text(parameter)
        hf = []
        for text in tensors.split(" + "):
            tensor, dims = _split_text(text)
            hf.append(HFTensor(f"model.layers.{{layer}}.{tensor}", dims or axes))
        yield WeightEntry(name, axes, tuple(hf), kind=cast(LayerKind, kind))


def _split_text(text: str) -> tuple[str, tuple[str, ...]]:
    name, _, axes = text.strip().removesuffix("]").partition(" [")
    return name, tuple(axes.split(", ")) if axes else ()


def can_travel_in_fp8(entry: WeightEntry) -> bool:
    """True for matrices of layers; not for embeddings, heads, routers, norms, biases."""
    # Routers and value heads are not converted to FP8.
    are_matrices = all(len(tensor.dims) == 2 and not {"experts", "score"} & {*tensor.dims} for tensor in entry.hf)
    return entry.half is not None and are_matrices


def pad_vocab(model: ModelShape, tp_size: int) -> int:
    """Round the vocabulary up to a multiple of the tensor-parallel size."""
    return -(-model.vocab // tp_size) * tp_size


def list_experts(entry: WeightEntry, model: ModelShape) -> range:
    """List the experts with a tensor of their own; [0] elsewhere."""
    has_tensors = entry.per_expert and not entry.is_stacked and model.experts is not None
    return range(model.sizes["experts"]) if has_tensors else range(1)


def iter_entries(
    entries: tuple[WeightEntry, ...], model: ModelShape, layers: Sequence[int]
) -> Iterator[tuple[WeightEntry, int, int]]:
    """Yield (row, layer in the model, layer in the stage) of a stage.

    Runs of per-layer entries are repeated for each layer; both layers are 0 for entries outside layers.
    """
    for per_layer, run in groupby(entries, lambda entry: entry.half is not None):
        repeated = list(run)
        for local, layer in enumerate(layers if per_layer else [0]):
            kinds = model.list_kinds(layer)
            for entry in repeated:
                if entry.kind is None or entry.kind in kinds:
                    yield entry, layer, local


class TensorKey(NamedTuple):
    """The position of a tensor in the weight map."""

    number: int  # in the order of export
    row: int
    tensor: HFTensor
    layer: int
    expert: int


def index_tensors(entries: tuple[WeightEntry, ...], model: ModelShape) -> dict[str, TensorKey]:
    """List a model's tensors, by name, in the order of export."""
    keys: dict[str, TensorKey] = {}
    rows = {entry: row for row, entry in enumerate(entries)}
    for entry, layer, _ in iter_entries(entries, model, range(model.layers)):
        for expert in list_experts(entry, model) if not entry.copy else ():
            for tensor, name in zip(entry.hf, entry.name_tensors(layer, expert), strict=True):
                keys[name] = TensorKey(len(keys), rows[entry], tensor, layer, expert)
    return keys
