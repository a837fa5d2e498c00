"""The table that says where vLLM's model keeps each Hugging Face tensor: which part, and where in which parameter.

It stands beside the table of Megatron's parameters and is read off the same entries: what is merged there is merged
here too, but in vLLM's order (all queries, all keys, all values), and cut by vLLM's rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_grpo.models.places import Part, Place
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import Dim, HFTensor, WeightEntry, WeightSlice

VOCABULARY_MULTIPLE = 64
"""vLLM pads vocabularies to a multiple of this."""

_SPLIT: tuple[Dim, ...] = (
    "vocab",
    "ffn",
    "heads",
    "kv_heads",
    "expert_ffn",
    "shared_ffn",
    "latent_queries",
    "latent_keys_values",
    "latent_values",
)
"""Dimensions that tensor parallelism splits; a tensor has at most one of them."""

_COMPRESSED = ("q_a_proj", "kv_a_proj_with_mqa")
"""Matrices that vLLM joins when queries too are made of a short vector (multi-latent attention)."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a rank of an engine keeps its part of one Hugging Face tensor."""

    parameter: str
    """Name of vLLM's parameter."""
    part: WeightSlice
    """The part of the tensor that the rank keeps."""
    row: int
    """Row of the parameter (of the expert's matrix in it) in which the part begins."""
    expert: int | None
    """Number of the expert among the rank's own, which the parameter's first dimension counts; None: it has none."""


def landings(entry: WeightEntry, model: ModelShape, place: Place, layer: int = 0, expert: int = 0) -> list[Landing]:
    """Where a rank keeps the tensors of an entry, in the order of `entry.hf`.

    Args:
        entry: row of the table of Megatron's parameters.
        model: sizes of the model.
        place: the rank's.
        layer: number of the layer, from 0, one of the rank's.
        expert: number of the expert in the layer, from 0, one of the rank's.
    """
    part = place.expert_tensor if entry.per_expert else place.tensor
    parts = [_part(tensor, model, part, layer, expert) for tensor in entry.hf]
    rows = [one.local_shape[0] for one in parts]
    found = []
    for position, one in enumerate(parts):
        joined = position if entry.merge in ("qkv", "gate_up") else 0
        row = sum(rows[:joined]) + _rows_before(entry, model)
        slot = expert - place.experts[0] if entry.per_expert else None
        found.append(Landing(_parameter(entry, position, model, one.name), one, row, slot))
    return found


def _part(tensor: HFTensor, model: ModelShape, part: Part, layer: int, expert: int) -> WeightSlice:
    shape, name = tensor.shape(model), tensor.name.format(layer=layer, expert=expert)
    axis = next((axis for axis, dim in enumerate(tensor.dims) if dim in _SPLIT), None)
    if axis is None:
        return WeightSlice(name, shape, None, 0, 0)
    total = shape[axis]
    if tensor.dims[axis] == "vocab":
        width = -(-total // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // part.count
        return WeightSlice(name, shape, axis, min(part.index * width, total), min((part.index + 1) * width, total))
    if tensor.dims[axis] == "kv_heads" and part.count > model.key_value_heads:  # several ranks have the same head
        part = Part(part.index // (part.count // model.key_value_heads), model.key_value_heads)
    width = total // part.count
    return WeightSlice(name, shape, axis, part.index * width, (part.index + 1) * width)


def _parameter(entry: WeightEntry, position: int, model: ModelShape, name: str) -> str:
    """Name of the parameter that a tensor of this name is kept in."""
    module, _, kind = name.rpartition(".")
    if entry.per_expert:
        block = module[: module.index(".experts.")]
        return f"{block}.experts.routed_experts.{'w13' if entry.merge == 'gate_up' else 'w2'}_{kind}"
    above, _, last = module.rpartition(".")
    if entry.merge == "qkv":
        return f"{above}.qkv_proj.{kind}"
    if entry.merge == "gate_up":
        return f"{above}.gate_up_proj.{kind}"
    if last in _COMPRESSED and _query_rank(model):
        return f"{above}.fused_qkv_a_proj.{kind}"
    return name


def _rows_before(entry: WeightEntry, model: ModelShape) -> int:
    """Rows of the parameter before those of an entry that is joined with another."""
    return _query_rank(model) if entry.hf[0].name.endswith(f".{_COMPRESSED[1]}.weight") else 0


def _query_rank(model: ModelShape) -> int:
    """Length of the vector that queries are made of; 0: they are made of the hidden state."""
    return model.latent.query_rank or 0 if model.latent is not None else 0
