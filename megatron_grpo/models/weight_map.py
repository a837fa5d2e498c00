"""The weight map: which Megatron parameter holds which Hugging Face tensors, and how ranks split them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from megatron_grpo.models.shape import ModelShape

Dim = str
"""Name of a tensor's dimension (size: `resolve_dim`); "heads" and "kv_heads" count features: heads * head_dim.

With latent attention, "latent" is the rank of keys and values, "compressed" that rank plus the length of the rotated
key, and the other "latent_..." are the features of all heads together."""

# Dimensions that tensor parallelism splits; a tensor has at most one of them.
_SPLIT_DIMS = {"vocab", "ffn", "heads", "kv_heads", "expert_ffn", "shared_ffn"}
_SPLIT_DIMS |= {"latent_queries", "latent_keys_values", "latent_values"}

Merge = Literal["plain", "qkv", "gate_up", "vocab"]
"""How slices of several tensors become one parameter:
plain: the parameter is the slice;
qkv: for each key/value group its query heads, then its key, then its value, along dimension 0;
gate_up: the rank's gate rows, then its up rows;
vocab: rows are padded with zeros to a multiple of the tensor-parallel size."""


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of the Hugging Face model."""

    name: str  # with `{layer}` where the number of the layer goes
    dims: tuple[Dim, ...]

    def compute_shape(self, model: ModelShape) -> tuple[int, ...]:
        return tuple(resolve_dim(dim, model) for dim in self.dims)


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Part `start:stop` of a full tensor along `axis`; axis None: all of it."""

    name: str
    shape: tuple[int, ...]  # of the full tensor that is cut
    axis: int | None
    start: int
    stop: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], self.stop - self.start, *self.shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A Megatron parameter and the Hugging Face tensors merged in it."""

    megatron: tuple[str, ...]
    """Names of the parameter, with `{layer}` and, for an expert's parameter, `{expert}`; several when Transformer
    Engine's layer spec and the torch one name it differently."""
    hf: tuple[HFTensor, ...]  # one; gate and up; or query, key and value
    copy: bool = False
    """Whether the parameter is a second copy of another entry's tensors (tied embeddings): loaded, but not exported."""
    zero_if_absent: bool = False  # a folder may lack these tensors, which then start at zero
    layers: Literal["all", "dense", "experts"] = "all"
    """Layers that have the parameter: all, those with a dense feed-forward network, or those with experts."""

    @property
    def axis(self) -> int | None:
        """Dimension that tensor parallelism splits; None: every rank has all."""
        return next((axis for axis, dim in enumerate(self.hf[0].dims) if dim in _SPLIT_DIMS), None)

    @property
    def merge(self) -> Merge:
        several: dict[int, Merge] = {2: "gate_up", 3: "qkv"}
        return several.get(len(self.hf), "vocab" if "vocab" in self.hf[0].dims else "plain")

    @property
    def per_expert(self) -> bool:
        """Whether every expert has a parameter of its own."""
        return "{expert}" in self.megatron[0]

    def list_slices(self, model: ModelShape, layer: int, rank: int, size: int, expert: int = 0) -> list[WeightSlice]:
        """List the slice of each tensor that a rank holds.

        `rank` of `size` is the rank's number in its tensor-parallel group or, for experts, in its expert-tensor group.
        """
        axis, slices = self.axis, []
        for index, tensor in enumerate(self.hf):
            shape, name = tensor.compute_shape(model), tensor.name.format(layer=layer, expert=expert)
            start, stop = (0, 0) if axis is None else self._find_range(index, shape[axis], model, rank, size)
            slices.append(WeightSlice(name, shape, axis, start, stop))
        return slices

    def _find_range(self, index: int, total: int, model: ModelShape, rank: int, size: int) -> tuple[int, int]:
        if self.merge == "vocab":  # padded at its end: the last ranks may hold fewer entries, or none
            width = -(-total // size)
            return min(rank * width, total), min((rank + 1) * width, total)
        if self.merge == "qkv" and size > model.key_value_heads:
            # The merged rows are cut evenly, through the middle of a group: a rank has some rows of one group, which
            # may be queries, its key or its value.
            widths = count_group_rows(model)
            pieces = size // model.key_value_heads
            group, piece = divmod(rank, pieces)
            rows = sum(widths) // pieces
            begin = sum(widths[:index])
            inside = [min(max(end - begin, 0), widths[index]) for end in (piece * rows, (piece + 1) * rows)]
            return group * widths[index] + inside[0], group * widths[index] + inside[1]
        return rank * (total // size), (rank + 1) * (total // size)


def map_parameter(megatron: str | tuple[str, ...], *hf: str) -> WeightEntry:
    """Map a parameter of each layer, behind "decoder.layers.{layer}.", to its tensors.

    `megatron` has several names for several layer specs. `hf` has a tensor's name, behind "model.layers.{layer}.", and
    its dimensions in brackets.
    """
    names = (megatron,) if isinstance(megatron, str) else megatron
    tensors = (text.removesuffix("]").split(" [") for text in hf)
    return WeightEntry(
        tuple(f"decoder.layers.{{layer}}.{name}" for name in names),
        tuple(HFTensor(f"model.layers.{{layer}}.{name}", tuple(dims.split(", "))) for name, dims in tensors),
    )


def limit_to(layers: Literal["dense", "experts"], *entries: WeightEntry) -> tuple[WeightEntry, ...]:
    return tuple(replace(entry, layers=layers) for entry in entries)


def resolve_dim(dim: Dim, model: ModelShape) -> int:
    sizes = {
        "vocab": model.vocab,
        "hidden": model.hidden,
        "ffn": model.ffn_hidden,
        "heads": model.attention_heads * model.head_dim,
        "kv_heads": model.key_value_heads * model.head_dim,
        "head_dim": model.head_dim,
        "score": 1,
    }
    if model.experts is not None:
        experts = model.experts
        sizes |= {"experts": experts.count, "expert_ffn": experts.ffn_hidden, "shared_ffn": experts.shared_ffn_hidden}
    if model.latent is not None:
        latent, heads = model.latent, model.attention_heads
        sizes |= {
            "query_rank": latent.query_rank or 0,
            "latent": latent.rank,
            "compressed": latent.rank + latent.rope_dim,
            "latent_queries": heads * (latent.plain_dim + latent.rope_dim),
            "latent_keys_values": heads * (latent.plain_dim + latent.value_dim),
            "latent_values": heads * latent.value_dim,
        }
    return sizes[dim]


def count_group_rows(model: ModelShape) -> list[int]:
    """Count rows of a key/value group: queries, key, value."""
    heads_per_group = model.attention_heads // model.key_value_heads
    return [heads_per_group * model.head_dim, model.head_dim, model.head_dim]


def pad_vocab(model: ModelShape, tp_size: int) -> int:
    """Round the vocabulary up to a multiple of the tensor-parallel size."""
    return -(-model.vocab // tp_size) * tp_size


def list_experts(entry: WeightEntry, model: ModelShape) -> range:
    """List the experts that a row describes; [0] outside experts."""
    return range(model.experts.count) if entry.per_expert and model.experts is not None else range(1)


def is_per_layer(name: str) -> bool:
    return "{layer}" in name


def iter_entries(
    entries: tuple[WeightEntry, ...], model: ModelShape, layers: Sequence[int]
) -> Iterator[tuple[WeightEntry, int, int]]:
    """Yield (row, layer in the model, layer in the stage) of a stage.

    Runs of per-layer entries are repeated for each layer; both layers are 0 for entries outside layers.
    """
    for per_layer, run in groupby(entries, lambda entry: is_per_layer(entry.megatron[0])):
        repeated = list(run)
        for local, layer in enumerate(layers if per_layer else [0]):
            kind = "experts" if model.has_experts(layer) else "dense"
            for entry in repeated:
                if entry.layers in ("all", kind):
                    yield entry, layer, local


@dataclass(frozen=True, slots=True)
class ModelMap:
    """Sizes and weight map of a model; engines get it as JSON."""

    shape: ModelShape
    entries: tuple[WeightEntry, ...]
