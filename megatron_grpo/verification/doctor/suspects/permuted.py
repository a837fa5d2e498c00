"""Suspects of exchanged weights: matrices, rows of heads, experts, shards of ranks, layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.verification.doctor.suspects.parts import find_head_width
from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect
from megatron_grpo.verification.doctor.suspects.versions import REFIT

Tensors = Mapping[str, Tensor]
Exchange = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""From a layer's tensors, by name without the layer's prefix, to the changed ones by these names."""
MOST_PAIRS = 16
"""Most heads or experts of which every pair is exchanged; of more only neighbours."""
MATRICES = (("gate_proj", "up_proj"), ("k_proj", "v_proj"), ("q_proj", "k_proj"), ("q_proj", "v_proj"))
NORMS = (("input_layernorm", "post_attention_layernorm"), ("q_norm", "k_norm"))


def iterate_permutations(side: Side) -> Iterator[Candidate]:
    """Yield exchanged weights, in each layer alone and in every layer."""
    tensors, count = side.oracle.list_tensors(), len(side.oracle.layers)
    of_layers = [_select_layer(tensors, number) for number in range(count)]
    for name, text, exchange in _iterate_exchanges(of_layers[-1], side.oracle.model.config):
        changes = [_add_prefix(number, exchange(layer)) for number, layer in enumerate(of_layers)]
        if count > 1:
            everywhere = {tensor: value for change in changes for tensor, value in change.items()}
            yield from _iterate_candidates(name, f"{text} in every layer", everywhere)
        for number, change in enumerate(changes):
            yield from _iterate_candidates(name, f"{text} in layer {number}", change)
    yield from _iterate_exchanged_layers(of_layers)
    yield from _iterate_ends(tensors)


def _iterate_candidates(name: str, text: str, values: Tensors) -> Iterator[Candidate]:
    if values:
        yield Suspect(name, "weights", f"has {text}", REFIT), partial(_with_values, values)


def _with_values(values: Tensors, side: Side) -> Tensor:
    with side.oracle.replaced(values):
        return side.predict()


def _select_layer(tensors: Tensors, number: int) -> dict[str, Tensor]:
    mark = f".layers.{number}."
    return {name.partition(mark)[2]: value for name, value in tensors.items() if mark in name}


def _add_prefix(number: int, change: Tensors) -> dict[str, Tensor]:
    return {f"model.layers.{number}.{name}": value for name, value in change.items()}


def _iterate_exchanges(layer: dict[str, Tensor], config: Any) -> Iterator[tuple[str, str, Exchange]]:
    """Yield name of the finding, text and exchange of each trial."""
    for first, second in (*MATRICES, *NORMS):
        name = "gate_up_swapped" if first == "gate_proj" else "permuted_weights"
        yield name, f"{first} and {second} in each other's place", partial(_swap_names, first, second)
        text = f"the biases of {first} and {second} in each other's place"
        yield "permuted_weights", text, partial(_swap_names, f"{first}.bias", f"{second}.bias")
    text = "the second halves of gate_proj and up_proj exchanged"
    yield "permuted_weights", text, partial(_reorder_halves, (0, 3, 2, 1))
    text = "gate_proj and up_proj split over two ranks as one matrix"
    yield "permuted_weights", text, partial(_reorder_halves, (0, 2, 1, 3))
    for projection, heads in _count_heads(layer, config).items():
        for text, order in _list_orders(heads).items():
            yield "permuted_weights", f"heads of {projection} {text}", partial(_order_heads, projection, order)
    for words, back in (("in", False), ("out of", True)):
        text = f"query and key rows {words} the order of interleaved rotary pairs"
        yield "permuted_weights", text, partial(_reorder_rotary_pairs, back, config)
    experts = next((len(value) for value in layer.values() if value.dim() == 3), 0)
    for expert in range(experts):
        text = f"gate_proj and up_proj of expert {expert} in each other's place"
        yield "gate_up_swapped", text, partial(_swap_in_expert, expert)
    for text, order in _list_orders(experts).items():
        yield "permuted_weights", f"experts {text}", partial(_order_experts, order)
    for projection in ("o_proj", "down_proj"):
        text = f"the halves of {projection}'s columns exchanged"
        yield "permuted_weights", text, partial(_swap_halves, projection, 1)
    for projection in ("gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "qkv_proj"):
        text = f"the halves of {projection}'s rows exchanged"
        yield "permuted_weights", text, partial(_swap_halves, projection, 0)
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        yield "permuted_weights", f"{projection} transposed", partial(_transpose, projection)


def _swap_names(first: str, second: str, layer: dict[str, Tensor]) -> dict[str, Tensor]:
    changed = {}
    for name, value in layer.items():
        if name.endswith("gate_up_proj") and (first, second) == MATRICES[0]:  # [experts, gate rows and up rows, hidden]
            changed[name] = torch.cat(value.chunk(2, dim=1)[::-1], dim=1)
        for old_word, new_word in ((first, second), (second, first)):
            swapped = layer.get(name.replace(old_word, new_word)) if re.search(rf"{old_word}(\.|$)", name) else None
            if swapped is not None and swapped.shape == value.shape:
                changed[name] = swapped
    return changed


def _swap_in_expert(expert: int, layer: dict[str, Tensor]) -> dict[str, Tensor]:
    changed = {}
    for name, value in layer.items():
        if name.endswith("gate_up_proj"):
            changed[name] = value.clone()
            changed[name][expert] = torch.cat(value[expert].chunk(2)[::-1])
    return changed


def _reorder_halves(order: tuple[int, ...], layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reorder the four halves of gate and up, one above the other."""
    changed = {}
    for name, value in layer.items():
        up = layer.get(name.replace("gate_proj", "up_proj")) if "gate_proj." in name else None
        if up is not None and up.shape == value.shape:
            halves = [*value.chunk(2), *up.chunk(2)]
            changed[name] = torch.cat([halves[number] for number in order[:2]])
            changed[name.replace("gate_proj", "up_proj")] = torch.cat([halves[number] for number in order[2:]])
    return {name: value for name, value in changed.items() if value.shape == layer[name].shape}


def _count_heads(layer: Tensors, config: Any) -> dict[str, int]:
    """Count the heads of each projection: in its rows, or o_proj's columns."""
    width = find_head_width(config)
    heads = {}
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = layer.get(f"self_attn.{projection}.weight")
        size = 0 if weight is None else weight.shape[projection == "o_proj"]
        if size and size % width == 0 and size > width:
            heads[projection] = size // width
    return heads


def _list_orders(count: int) -> dict[str, list[int]]:
    """List other orders of heads or experts, by description."""
    if count < 2:
        return {}
    numbers = list(range(count))
    orders: dict[str, list[int]] = {}
    pairs = combinations(numbers, 2) if count <= MOST_PAIRS else pairwise(numbers)
    for first, second in pairs:
        swapped = list(numbers)
        swapped[first], swapped[second] = second, first
        orders[f"{first} and {second} in each other's place"] = swapped
    orders |= {"moved by one": [*numbers[1:], 0], "in reverse order": numbers[::-1]}
    for parts in (2, 4, 8):
        if count % parts == 0 and count > parts:
            grid = torch.arange(count).view(parts, -1)
            orders[f"in the order of {parts} interleaved ranks"] = grid.T.reshape(-1).tolist()
            orders[f"out of the order of {parts} interleaved ranks"] = grid.view(-1, parts).T.reshape(-1).tolist()
            orders[f"with the first of {parts} ranks last"] = grid.roll(-1, 0).reshape(-1).tolist()
    named: dict[tuple[int, ...], str] = {}
    for text, order in orders.items():
        named.setdefault(tuple(order), text)  # the simplest description of an order comes first
    return {text: list(order) for order, text in named.items() if list(order) != numbers}


def _order_heads(projection: str, order: list[int], layer: dict[str, Tensor]) -> dict[str, Tensor]:
    changed = {}
    for kind in ("weight", "bias"):
        name = f"self_attn.{projection}.{kind}"
        value = layer.get(name)
        dim = 1 if projection == "o_proj" else 0
        if value is not None and value.dim() > dim:
            pieces = value.chunk(len(order), dim=dim)
            changed[name] = torch.cat([pieces[number] for number in order], dim=dim)
    return changed


def _order_experts(order: list[int], layer: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[order] for name, value in layer.items() if value.dim() == 3 and len(value) == len(order)}


def _reorder_rotary_pairs(back: bool, config: Any, layer: dict[str, Tensor]) -> dict[str, Tensor]:
    # Rotary embeddings rotate pairs of rows: neighbours (0, 1), (2, 3) in the original form, and row i with row
    # i + width / 2 in transformers. A conversion that is left out, or done twice, leaves rows in the other order.
    width = find_head_width(config)
    changed = {}
    for name, value in layer.items():
        if name.startswith(("self_attn.q_proj.", "self_attn.k_proj.")) and len(value) % width == 0:
            heads = value.view(-1, width, *value.shape[1:])
            order = (
                torch.arange(width).view(2, -1).T.reshape(-1) if back else torch.arange(width).view(-1, 2).T.reshape(-1)
            )
            changed[name] = heads[:, order].reshape(value.shape)
    return changed


def _swap_halves(projection: str, dim: int, layer: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [name for name, value in layer.items() if f"{projection}." in name and value.dim() == 2]
    return {name: torch.cat(layer[name].chunk(2, dim=dim)[::-1], dim=dim) for name in names}


def _transpose(projection: str, layer: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [name for name in layer if name.endswith(f"{projection}.weight")]
    return {name: layer[name].T.contiguous() for name in names if layer[name].shape[0] == layer[name].shape[1]}


def _iterate_exchanged_layers(of_layers: list[dict[str, Tensor]]) -> Iterator[Candidate]:
    for number, (first, second) in enumerate(pairwise(of_layers)):
        if {name: value.shape for name, value in first.items()} == {
            name: value.shape for name, value in second.items()
        }:
            values = _add_prefix(number, second) | _add_prefix(number + 1, first)
            text = f"layers {number} and {number + 1} in each other's place"
            yield from _iterate_candidates("permuted_weights", text, values)


def _iterate_ends(tensors: Tensors) -> Iterator[Candidate]:
    """Yield rows of embedding and head in another order."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        value = tensors.get(name)
        if value is None:
            continue
        for text, reordered in (
            ("the halves of its rows exchanged", torch.cat(value.chunk(2)[::-1])),
            ("its rows moved up by one", value.roll(-1, 0)),
            ("its rows moved down by one", value.roll(1, 0)),
        ):
            yield from _iterate_candidates("permuted_weights", f"{name} with {text}", {name: reordered})
