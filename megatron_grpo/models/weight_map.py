"""The table that says how each Megatron parameter is made of Hugging Face tensors, and who holds which slice of them.

One entry covers one Megatron parameter (of every layer, when its name has a `{layer}`). Whatever the merge, a
tensor-parallel rank's parameter is made of one contiguous slice of each Hugging Face tensor: `WeightEntry.slices` gives
them, and `models.merge` goes from the slices to the parameter and back. Reading, writing, gathering and shard-to-shard
plans need nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_grpo.models.shape import ModelShape

Dim = Literal["vocab", "hidden", "ffn", "heads", "kv_heads", "head_dim", "score"]
"""A dimension of a tensor; "heads" and "kv_heads" are in units of features: heads * head_dim; "score" is 1."""

Merge = Literal["plain", "qkv", "gate_up", "vocab"]
"""How slices of several tensors become one parameter:
plain: the parameter is the slice;
qkv: for each key/value group its query heads, then its key, then its value, along dimension 0;
gate_up: the rank's gate rows, then its up rows;
vocab: rows are padded with zeros to a multiple of the tensor-parallel size."""


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A tensor of the Hugging Face model."""

    name: str
    """Name of the tensor, with `{layer}` where the number of the layer goes."""
    dims: tuple[Dim, ...]

    def shape(self, model: ModelShape) -> tuple[int, ...]:
        """Full shape of the tensor in a model of these sizes."""
        return tuple(dim_size(dim, model) for dim in self.dims)


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Rows (or columns) `start:stop` along `axis` of one full Hugging Face tensor; axis None: all of it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor that is cut."""
    axis: int | None
    start: int
    stop: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], self.stop - self.start, *self.shape[self.axis + 1 :])


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One Megatron parameter and what it is made of."""

    megatron: tuple[str, ...]
    """Names of the parameter, with `{layer}`: several when Transformer Engine's layer spec and the torch one differ."""
    hf: tuple[HFTensor, ...]
    axis: int | None
    """Dimension that tensor parallelism splits in each of the tensors; None: every rank holds all of them."""
    merge: Merge = "plain"
    copy: bool = False
    """A second copy of tensors that another entry stands for (tied embeddings): loaded, but not exported."""
    zero_if_absent: bool = False
    """A folder without these tensors is complete: they are new, and start at zero."""

    def slices(self, model: ModelShape, layer: int, tp_rank: int, tp_size: int) -> list[WeightSlice]:
        """What rank `tp_rank` of `tp_size` holds of each tensor, in the order of `hf`; `layer` counts from 0."""
        found = []
        for tensor in self.hf:
            shape = tensor.shape(model)
            start, stop = 0, 0
            if self.axis is not None:
                # The vocabulary is padded behind its end: the last ranks may hold fewer entries, or none.
                size = shape[self.axis]
                width = -(-size // tp_size) if self.merge == "vocab" else size // tp_size
                start, stop = min(tp_rank * width, size), min((tp_rank + 1) * width, size)
            found.append(WeightSlice(tensor.name.format(layer=layer), shape, self.axis, start, stop))
        return found


def dim_size(dim: Dim, model: ModelShape) -> int:
    """Size of a dimension in a model of this shape."""
    return {
        "vocab": model.vocab,
        "hidden": model.hidden,
        "ffn": model.ffn_hidden,
        "heads": model.attention_heads * model.head_dim,
        "kv_heads": model.key_value_heads * model.head_dim,
        "head_dim": model.head_dim,
        "score": 1,
    }[dim]


def padded_vocab(model: ModelShape, tp_size: int) -> int:
    """Vocabulary entries of the Megatron model: the next multiple of the tensor-parallel size."""
    return -(-model.vocab // tp_size) * tp_size


def is_per_layer(name: str) -> bool:
    """Whether a name stands for one tensor per layer."""
    return "{layer}" in name


def global_entries(entries: tuple[WeightEntry, ...], layers: list[int]) -> Iterator[tuple[WeightEntry, int, int]]:
    """Every (entry, layer in the model, layer in this stage) of a stage that holds `layers`, in the order of the table.

    Runs of per-layer entries are repeated for each layer; both numbers are 0 for entries outside layers.
    """
    position = 0
    while position < len(entries):
        end = position
        while end < len(entries) and is_per_layer(entries[end].megatron[0]):
            end += 1
        for local, layer in enumerate(layers):
            for entry in entries[position:end]:
                yield entry, layer, local
        if end < len(entries):
            yield entries[end], 0, 0
        position = end + 1
