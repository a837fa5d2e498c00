"""Suspects of units in any other order: rows and columns of matrices, heads, experts, rows of embedding and head.

A matrix of 128 rows has thousands of exchanges of two rows, and each order is a product of such exchanges. From the
gradient g_i of a row and the rows w follows the effect of each exchange to first order, (g_i - g_j) . (w_j - w_i), so
one pass ranks them all. The best are tried exactly, and the search goes on from the closest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, permutations
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.verification.doctor.diagnosis import FLOAT32
from megatron_grpo.verification.doctor.law import compute_residual
from megatron_grpo.verification.doctor.suspects.effects import Gradients, compute_effects
from megatron_grpo.verification.doctor.suspects.parts import EMBEDDING, HEAD, find_head_width
from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect
from megatron_grpo.verification.doctor.suspects.versions import REFIT

Order = tuple[int, ...]
"""By place, the number of the unit that stands there."""
MOST_UNITS = 160
"""Most units of an axis; their exchanges are half the square of it."""
MOST_PERMUTED = 4
"""Most units of which every order is compared; of more, exchanges of two."""
RANKED = 24
"""Orders of many units that are tried exactly in each round: those whose effects fit best, by size and direction."""
RANKED_BLOCKS = 64
"""Orders of few units that are: they move more of a matrix, so that their effects are less linear."""
RANKED_TOKENS = 600
"""Exchanges of the embedding's rows that are, in a single rollout: another token is farther than linear."""
FEW_UNITS = 8
CONTINUED = 2
"""Axes from whose best order the search goes on."""
ROUNDS = 5
"""Most exchanges that follow each other."""
IMPROVED = 0.97
"""Share of the difference that a further exchange may leave at most."""
BLOCKS = (4, 8)
"""Numbers of equal blocks of a matrix's rows or columns that are reordered."""
MOST_LISTED = 12
"""Most moved units that a text lists."""


HEADS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")


@dataclass(frozen=True, slots=True)
class Axis:
    """Units of some tensors that may stand in another order."""

    name: str
    """Name in messages, such as heads of q_proj."""
    dims: Mapping[str, int]
    """By the tensor's name in transformers, the dimension along which the units lie."""
    count: int
    """Number of equal units."""
    movable: tuple[int, ...] | None = None
    """Units that the record shows; None: all."""

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(range(self.count)) if self.movable is None else self.movable

    def reorder(self, tensors: Mapping[str, Tensor], order: Order) -> dict[str, Tensor]:
        """Put units into another order; returns the changed tensors."""
        values = {}
        for name, dim in self.dims.items():
            numbers = torch.arange(self.count)
            numbers[list(self.units)] = torch.tensor(order)
            pieces = tensors[name].unflatten(dim, (self.count, -1))
            values[name] = pieces.index_select(dim, numbers).flatten(dim, dim + 1)
        return values

    def _measure_replacements(self, gradients: Gradients, tensors: Mapping[str, Tensor]) -> Tensor:
        """Measure the effect of unit j in the place of unit i.

        They are [units, units], float32.
        """
        products = torch.zeros(len(self.units), len(self.units))
        for name, dim in self.dims.items():
            if name in gradients:
                gradient, value = (self._split(part[name], dim) for part in (gradients, tensors))
                products += gradient @ value.T
        return products - products.diagonal()[:, None]

    def _split(self, value: Tensor, dim: int) -> Tensor:
        rows = value.movedim(dim, 0).reshape(self.count, -1).float()
        return rows if self.movable is None else rows[list(self.movable)]

    def count_orders(self) -> int:
        """Count the orders that are compared.

        Every one of few units, and exchanges of two of many.
        """
        units = len(self.units)
        return math.factorial(units) - 1 if units <= MOST_PERMUTED else units * (units - 1) // 2

    def change_order(self, order: Order, number: int) -> Order:
        """Make one of the orders that follow from another; `number`: below `count_orders`."""
        if len(order) <= MOST_PERMUTED:
            return list(permutations(order))[number + 1]  # the first one is the order itself
        first, second = torch.triu_indices(len(order), len(order), 1)[:, number].tolist()
        after = list(order)
        after[first], after[second] = after[second], after[first]
        return tuple(after)

    def predict_effects(self, gradients: Gradients, present: Mapping[str, Tensor]) -> Tensor:
        """Predict the effect of each order that follows from the present one: [orders], float32."""
        replacements, count = self._measure_replacements(gradients, present), len(self.units)
        if count > MOST_PERMUTED:
            first, second = torch.triu_indices(count, count, 1)
            return replacements[first, second] + replacements[second, first]
        orders = torch.tensor(list(permutations(range(count)))[1:])
        return replacements[torch.arange(count), orders].sum(1)


def list_axes(tensors: Mapping[str, Tensor], config: Any) -> list[Axis]:
    """List what may stand in another order in the layers of a model.

    `config`: the model's configuration in transformers.
    """
    axes = list(_list_experts(tensors))
    # Rows of a router in another order have the effect of experts in the inverse order, so these stand for both.
    routed = {(axis.name.rpartition(".")[0], axis.count) for axis in axes}
    for name, value in tensors.items():
        is_router = (name.rpartition(".")[0].rpartition(".")[0], len(value)) in routed
        if value.dim() == 2 and name not in (EMBEDDING, HEAD) and not is_router:
            axes += _list_matrix_axes(name, value, find_head_width(config))
    return axes


def _list_matrix_axes(name: str, value: Tensor, width: int) -> list[Axis]:
    """List heads (`width` rows each), blocks, rows and columns of a matrix."""
    names: dict[tuple[int, int], str] = {}  # the first name of units of the same size stays
    if name.endswith(HEADS):
        dim = int(name.endswith("o_proj.weight"))  # heads are columns of the output's projection
        names[dim, value.shape[dim] // width] = f"heads of {name}"
    for dim, words in ((0, "rows"), (1, "columns")):
        for count in BLOCKS:
            names.setdefault((dim, count), f"{count} blocks of {words} of {name}")
        names.setdefault((dim, value.shape[dim]), f"{words} of {name}")
    return [
        Axis(text, {name: dim}, count)
        for (dim, count), text in names.items()
        if 1 < count <= MOST_UNITS and value.shape[dim] % count == 0
    ]


def _list_experts(tensors: Mapping[str, Tensor]) -> Iterator[Axis]:
    stacks: dict[str, list[str]] = {}
    for name, value in tensors.items():
        if value.dim() == 3 and ".experts." in name:
            stacks.setdefault(name.rpartition(".")[0], []).append(name)
    for stack, names in stacks.items():
        count = len(tensors[names[0]])
        if 1 < count <= MOST_UNITS:
            yield Axis(stack, dict.fromkeys(names, 0), count)


def iterate_orders(side: Side) -> Iterator[Candidate]:
    """Yield units in the order that a search from exchange to exchange reaches."""
    tensors = side.oracle.list_tensors()
    axes = list_axes(tensors, side.oracle.model.config)
    closest: dict[str, tuple[float, Axis, Order]] = {}
    for distance, axis, order in _try_best(axes, {axis.name: axis.units for axis in axes}, tensors, side):
        closest.setdefault(axis.name, (distance, axis, order))
    for distance, axis, first in list(closest.values())[:CONTINUED]:
        order, distance = _continue_search(axis, first, distance, tensors, side)
        yield _make_candidate(axis, order, tensors)
        if distance <= FLOAT32.mean:
            return


def _make_candidate(axis: Axis, order: Order, tensors: Mapping[str, Tensor]) -> Candidate:
    moved = {slot: unit for slot, unit in zip(axis.units, order, strict=True) if slot != unit}
    is_stack = any(tensors[name].dim() == 3 for name in axis.dims)
    name = f"{axis.name}, or inversely the rows of their router," if is_stack else axis.name
    text = _describe_moves(name, moved)
    suspect = Suspect("permuted_weights", "weights", text, REFIT, assumes=len(moved), only_exact=True)
    return suspect, partial(_with_values, axis.reorder(tensors, order))


def _describe_moves(name: str, moved: Mapping[int, int]) -> str:
    """Describe units by the places in which they stand."""
    listed = ", ".join(f"{unit} in the place of {slot}" for slot, unit in list(moved.items())[:MOST_LISTED])
    ending = f" and {len(moved) - MOST_LISTED} more" if len(moved) > MOST_LISTED else ""
    return f"has {name} in another order: {listed}{ending}"


def iterate_token_orders(side: Side) -> Iterator[Candidate]:
    """Yield the exchange of two of the embedding's rows that fits one rollout best."""
    # Every rollout of the side differs, so each has a token whose row is another; one of many numbers is enough.
    numbers = range(len(side.tokens))
    longest = max(numbers, key=lambda number: (len(side.tokens[number].chosen), -len(side.tokens[number].ids)))
    tensors = side.oracle.list_tensors()
    ids, counts = torch.cat([tokens.ids for tokens in side.tokens]).unique(return_counts=True)
    used = ids[counts.argsort(descending=True)][:MOST_UNITS].sort().values.tolist()
    axis = Axis(f"rows of {EMBEDDING}", {EMBEDDING: 0}, len(tensors[EMBEDDING]), tuple(used))
    if len(used) > MOST_PERMUTED and not side.oracle.is_tied:
        _, _, order = _try_best([axis], {axis.name: axis.units}, tensors, side.select_rollouts([longest]))[0]
        yield _make_candidate(axis, order, tensors)


def _continue_search(
    axis: Axis, order: Order, distance: float, tensors: Mapping[str, Tensor], side: Side
) -> tuple[Order, float]:
    """Exchange further units while that comes closer; returns the order and its distance."""
    for _ in range(ROUNDS):
        if distance <= FLOAT32.mean:
            break
        nearest, _, further = _try_best([axis], {axis.name: order}, tensors, side)[0]
        if nearest > IMPROVED * distance:
            break
        order, distance = further, nearest
    return order, distance


def _try_best(
    axes: Sequence[Axis], start: Mapping[str, Order], tensors: Mapping[str, Tensor], side: Side
) -> list[tuple[float, Axis, Order]]:
    """Try the orders exactly whose effects fit best.

    Args:
        axes: what may be in another order.
        start: the order of each axis' units before the change, by name.
        tensors: the weights in their own order.
        side: the record.

    Returns:
        Mean difference of the record from each, with axis and order, closest first.
    """
    present = {name: value for axis in axes for name, value in axis.reorder(tensors, start[axis.name]).items()}

    groups: dict[int, list[Axis]] = {}
    for axis in axes:
        limit = RANKED if len(axis.units) > FEW_UNITS else RANKED_BLOCKS
        groups.setdefault(limit if axis.movable is None else RANKED_TOKENS, []).append(axis)
    probes = [partial(_predict_all, members, present) for members in groups.values()]
    with side.oracle.replaced(present):
        effects = compute_effects(side, probes, list(present))
    tried: list[tuple[float, Axis, Order]] = []
    for (limit, members), group_effects in zip(groups.items(), effects, strict=True):
        choices = [(axis, number) for axis in members for number in range(axis.count_orders())]
        ranked = zip(group_effects.rank_multiples(limit), group_effects.rank_changes(limit), strict=True)
        for choice in dict.fromkeys(chain.from_iterable(ranked)):
            axis, number = choices[choice]
            order = axis.change_order(start[axis.name], number)
            predicted = _with_values(axis.reorder(tensors, order), side)
            tried.append((float(compute_residual(side.recorded, predicted).mean()), axis, order))
            if tried[-1][0] <= FLOAT32.mean:
                return [tried[-1]]
    return sorted(tried, key=lambda entry: entry[0])


def _predict_all(axes: Sequence[Axis], present: Mapping[str, Tensor], gradients: Gradients) -> Tensor:
    return torch.cat([axis.predict_effects(gradients, present) for axis in axes])


def _with_values(values: Mapping[str, Tensor], side: Side) -> Tensor:
    with side.oracle.replaced(values):
        return side.predict()


def iterate_head_orders(side: Side) -> Iterator[Candidate]:
    """Yield rows of the head in the order that the recorded numbers say."""
    # Rows in another order leave the sum over the vocabulary as it is, so a recorded number is the log-probability of
    # the row that stands in the place of the sampled token. Which one that is can be read off, whatever the order is.
    moved = _match_head_rows(side)
    if moved:
        text = _describe_moves(f"rows of {HEAD}", moved)
        yield Suspect("permuted_weights", "weights", text, REFIT, only_exact=True), _predict_matched


def _predict_matched(side: Side) -> Tensor:
    moved = _match_head_rows(side)
    head = side.oracle.model.get_output_embeddings().weight
    order = list(range(len(head)))
    for token, row in moved.items():
        order[token] = row
    # Rows of tokens that were not sampled are unknown; the sum needs every row once, so each chain is closed.
    for first in moved.keys() - set(moved.values()):
        last = first
        while last in moved:
            last = moved[last]
        order[last] = first
    with side.oracle.other_head(head[order]):
        return side.predict()


def _match_head_rows(side: Side) -> dict[int, int]:
    """Match sampled tokens with the rows that have their numbers.

    By token, rows other than its own; empty if a token matches none.
    """
    logprobs = torch.cat(side.oracle.compute_probabilities(side.tokens, side.law)).log()
    sampled = torch.cat([tokens.ids[tokens.chosen] for tokens in side.tokens])
    rows: dict[int, int] = {}
    for token in sampled.unique().tolist():
        apart = (logprobs[sampled == token] - side.recorded[sampled == token][:, None]).abs().amax(0)
        row = int(apart.argmin()) if float(apart[token]) > FLOAT32.worst else token
        if float(apart[row]) > FLOAT32.worst or row in rows.values():
            return {}
        rows[token] = row
    return {token: row for token, row in rows.items() if token != row}
