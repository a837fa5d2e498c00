"""Parts of a model whose weights go wrong together: tensors, layers, stages, shards, experts, kinds of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Region = tuple[slice, ...]
"""Rows, columns and so on of a tensor; empty: all of it."""
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
_COLUMN = re.compile(r"(q_proj|k_proj|v_proj|gate_proj|up_proj|q_b_proj|kv_b_proj)\.(weight|bias)$")
_ROW = re.compile(r"(o_proj|down_proj)\.weight$")
_NUMBER = re.compile(r"\.layers\.\d+\.")
FUSED = {
    "query, key and value weights": r"self_attn\.[qkv]_proj\.weight$",
    "query, key and value biases": r"self_attn\.[qkv]_proj\.bias$",
    "gate and up weights": r"(gate_proj|up_proj)\.weight$|gate_up_proj$",
    "norm weights": r"norm\.weight$",
    "attention weights": r"self_attn\..*\.weight$",
    "weights of the experts": r"mlp\.experts\.",
    "weights of the shared experts": r"mlp\.shared_experts?\.",
    "biases": r"\.bias$",
}
"""Kinds of tensors that programs fuse, or load by one rule, as expressions of their names."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some tensors of a model, or regions of them."""

    name: str
    """Name in messages, such as layer 3."""
    regions: Mapping[str, Region]
    """By the tensor's name in transformers."""

    def mix(self, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put the other model's numbers into the part; returns the changed tensors."""
        values = {}
        for name, region in self.regions.items():
            value = ours[name].clone()
            value[region] = theirs[name][region]
            if not torch.equal(value, ours[name]):
                values[name] = value
        return values

    def scale(self, ours: Mapping[str, Tensor], factor: float, added: float = 0.0) -> dict[str, Tensor]:
        """Scale the part's numbers and add a number; returns the part's tensors."""
        values = {}
        for name, region in self.regions.items():
            value = ours[name].clone()
            value[region] = value[region] * factor + added
            values[name] = value
        return values


def list_single_tensors(tensors: Mapping[str, Tensor]) -> list[Part]:
    return [Part(name, {name: ()}) for name in tensors]


def list_layers(tensors: Mapping[str, Tensor], count: int) -> list[Part]:
    return [
        Part(f"layer {number}", _list_whole(tensors, _of_layers(tensors, number, number + 1)))
        for number in range(count)
    ]


def _of_layers(tensors: Mapping[str, Tensor], begin: int, end: int) -> list[str]:
    return [name for name in tensors if any(f".layers.{number}." in name for number in range(begin, end))]


def _list_whole(tensors: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Region]:
    return {name: () for name in names if name in tensors}


def list_stages(tensors: Mapping[str, Tensor], layers: int, sizes: Sequence[int]) -> Iterator[Part]:
    """Yield the stages of layouts with `sizes` stages, with embedding and head."""
    for size in sorted(set(sizes)):
        if not 1 < size <= layers:
            continue
        bounds = [layers * number // size for number in range(size + 1)]
        for number, (begin, end) in enumerate(pairwise(bounds)):
            names = _of_layers(tensors, begin, end)
            names += [EMBEDDING] if number == 0 else []
            names += [HEAD, NORM] if number == size - 1 else []
            yield Part(f"stage {number} of {size} (layers {begin} to {end - 1})", _list_whole(tensors, names))


def list_kinds(tensors: Mapping[str, Tensor]) -> Iterator[Part]:
    """Yield fused kinds of tensors, and each kind over all layers."""
    for kind, expression in FUSED.items():
        names = [name for name in tensors if re.search(expression, name)]
        if len(names) > 1:
            yield Part(f"all {kind}", _list_whole(tensors, names))
    kinds: dict[str, list[str]] = {}
    for name in tensors:
        if _NUMBER.search(name):
            kinds.setdefault(_NUMBER.split(name)[1], []).append(name)
    for kind, names in kinds.items():
        if len(names) > 1:
            yield Part(f"{kind} of every layer", _list_whole(tensors, names))


def list_shards(tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> Iterator[Part]:
    """Yield the weights of each tensor- and expert-parallel rank, over all layers."""
    for size in sorted(set(sizes)):
        for rank in range(size if size > 1 else 0):
            shard = {name: region for name, value in tensors.items() if (region := _cut_shard(name, value, rank, size))}
            yield Part(f"the shard of rank {rank} of {size} (tensor parallel)", shard)
            # Tensors of three dimensions are stacked experts, of which an expert-parallel rank has a range.
            experts = {name: (_slice(len(value), rank, size),) for name, value in tensors.items() if value.dim() == 3}
            if experts:
                yield Part(f"the experts of rank {rank} of {size} (expert parallel)", experts)


def list_tensor_shards(tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> Iterator[Part]:
    """Yield the shard of each tensor that each tensor-parallel rank would hold."""
    for name, value in tensors.items():
        for size in sizes:
            for rank in range(size):
                region = _cut_shard(name, value, rank, size)
                if region is not None and value[region].numel():
                    yield Part(f"the shard of rank {rank} of {size} of {name}", {name: region})


def _cut_shard(name: str, value: Tensor, rank: int, size: int) -> Region | None:
    if _COLUMN.search(name) or name in (HEAD, EMBEDDING):
        return (_slice(len(value), rank, size),)
    if _ROW.search(name):
        return (slice(None), _slice(value.shape[1], rank, size))
    return None


def _slice(length: int, rank: int, size: int) -> slice:
    return slice(length * rank // size, length * (rank + 1) // size)


def list_experts(tensors: Mapping[str, Tensor]) -> Iterator[Part]:
    """Yield each matrix of each expert, then each expert."""
    # Transformers stacks the experts of a layer, [experts, rows, columns], and gate on up; model files do neither.
    for name, value in tensors.items():
        if value.dim() != 3:
            continue
        prefix, _, last = name.rpartition(".")
        pieces = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        rows = value.shape[1] // len(pieces)
        for expert in range(len(value)):
            for number, piece in enumerate(pieces):
                region = (slice(expert, expert + 1), slice(number * rows, (number + 1) * rows))
                yield Part(f"{prefix}.{expert}.{piece}.weight", {name: region})
    stacks = sorted({name.rpartition(".")[0] for name, value in tensors.items() if value.dim() == 3})
    for stack in stacks:
        names = [name for name in tensors if name.startswith(f"{stack}.") and tensors[name].dim() == 3]
        for expert in range(len(tensors[names[0]])):
            yield Part(f"{stack}.{expert}", {name: (slice(expert, expert + 1),) for name in names})


def list_heads(tensors: Mapping[str, Tensor], config: Any) -> Iterator[Part]:
    """Yield each attention head of each projection of each layer."""
    width = find_head_width(config)
    for name, value in tensors.items():
        match = re.search(r"self_attn\.([qkvo])_proj\.weight$", name)
        if match is None:
            continue
        dim = int(match[1] == "o")  # heads are columns of the output's projection
        count = value.shape[dim] // width
        for head in range(count if value.shape[dim] % width == 0 and count > 1 else 0):
            rows = slice(head * width, (head + 1) * width)
            regions: dict[str, Region] = {name: (slice(None), rows) if dim else (rows,)}
            bias = name.replace(".weight", ".bias")
            if not dim and bias in tensors:
                regions[bias] = (rows,)
            yield Part(f"head {head} of {name}", regions)


def list_kinds_within(tensors: Mapping[str, Tensor], bounds: Sequence[Part]) -> Iterator[Part]:
    """Yield each kind of tensors within layers or stages."""
    for bound in bounds:
        inside = {name: tensors[name] for name in bound.regions}
        for kind in list_kinds(inside):
            if len(kind.regions) < len(inside):
                yield Part(f"{kind.name} of {bound.name}", kind.regions)


def find_head_width(config: Any) -> int:
    values = config.to_dict()  # an attribute that differs by layer, as in Gemma 4, cannot be read
    return int(values.get("head_dim") or config.hidden_size // config.num_attention_heads)
