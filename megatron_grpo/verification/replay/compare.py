"""Compares two replays of a step, or a replay with the record, and finds where they first differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.batch.replay_files import StateFigure
from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.trainer.hidden_states import ROUTER
from megatron_grpo.trainer.model_ranks import TrainResult
from megatron_grpo.trainer.step_record import SKETCH, sketch_rows
from megatron_grpo.verification.hidden_pieces import locate_point
from megatron_grpo.verification.replay.record import RecordedStep
from megatron_grpo.verification.replay.replayed_step import Replayed

Quantity = Literal["weights", "hidden states", "log-probabilities", "loss", "gradient norm", "gradients", "update"]

TOLERANCES: dict[str, dict[Quantity, float]] = {
    "float32": {
        "weights": 1e-6,
        "hidden states": 1e-4,
        "log-probabilities": 1e-4,
        "loss": 1e-5,
        "gradient norm": 1e-4,
        "gradients": 1e-3,
        "update": 2e-2,
    },
    "bfloat16": {
        "weights": 4e-3,
        "hidden states": 1e-1,
        "log-probabilities": 1e-1,
        "loss": 2e-2,
        "gradient norm": 5e-2,
        "gradients": 2e-1,
        "update": 6e-1,
    },
    "fp8": {
        "weights": 7e-2,
        "hidden states": 3e-1,
        "log-probabilities": 3e-1,
        "loss": 5e-2,
        "gradient norm": 2e-1,
        "gradients": 5e-1,
        "update": 1.0,
    },
}
"""Largest differences that count as rounding, by the coarser precision of the sides (reasons: docs/debugging.md)."""
SMALL = 1e-3
"""A tensor's difference is taken relative to its norm, or to this share of the norm of all tensors if that is larger:
some gradients are zero but for rounding, such as those of the biases of keys."""

TIES, FEWEST_TIES = 0.05, 3
"""Tokens that rounding may send to other experts at a router, where precision is coarser than float32: largest share,
and the number that is always allowed."""
EXPERT_GRADIENT = 2.0
"""Factor of the tolerance of gradients in a model with experts, because of these tokens."""


@dataclass(frozen=True, slots=True)
class Tail:
    """How rounding in a coarse precision spreads over tokens.

    A few tokens, whose terms cancel or which went to other experts, are several times as far apart as the others.
    """

    share: float
    """Share of the tokens, at least one token, that may exceed the tolerance."""
    times: float
    """Their limit, in tolerances."""
    typical: float
    """Limit of the median token, in tolerances."""


STATES_TAIL, LOGPROBS_TAIL, ROUTED_LOGPROBS_TAIL = Tail(0.02, 2.0, 0.6), Tail(0.02, 5.0, 1.0), Tail(0.03, 8.0, 1.0)
"""Tails of hidden states, and of log-probabilities without and with experts."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two sides in one quantity."""

    quantity: Quantity
    difference: float
    """Absolute for log-probabilities and the loss, else relative. Of tokens the largest one; with a `Tail` the least
    number that the tolerance must reach for its three limits to hold."""
    tolerance: float
    tensor: str | None = None
    """The first tensor, in the order of computation, beyond the tolerance; without one, the most different tensor."""
    sequence: int | None = None
    token: int | None = None
    """The first token beyond the tolerance, or the most different one: index of its sequence in the step, and its
    position in the sequence."""
    token_id: int | None = None

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.tolerance  # false for NaN

    @property
    def layer(self) -> int | None:
        """Number of the tensor's layer, from 0; None: no layer."""
        layer = find_layer(self.tensor or "")
        return layer if 0 <= layer < _LAST else None


_LAST = 1 << 30


def find_layer(name: str) -> int:
    """Find a name's layer: -1 before the first, `_LAST` after the last."""
    parts = name.split(".")
    if "layers" in parts[:-1] and (number := parts[parts.index("layers") + 1]).isdecimal():
        return int(number)
    return -1 if "embed" in name else _LAST


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides of a step, compared in the order of computation."""

    first: str
    second: str
    differences: list[Difference]

    @property
    def agrees(self) -> bool:
        """Whether every quantity is within its tolerance."""
        return all(difference.agrees for difference in self.differences)

    @property
    def first_difference(self) -> dict[str, str | int | None] | None:
        """Where the sides first differ; None: they agree.

        Quantity, layer and tensor are those of the first quantity beyond its tolerance; point, sequence and token those
        of the first one that has tokens, hidden states or log-probabilities.
        """
        apart = [difference for difference in self.differences if not difference.agrees]
        if not apart:
            return None
        at_tokens = next((difference for difference in apart if difference.token is not None), None)
        return {
            "quantity": apart[0].quantity,
            "layer": apart[0].layer,
            "tensor": apart[0].tensor,
            "point": None if at_tokens is None else at_tokens.tensor,
            "sequence": None if at_tokens is None else at_tokens.sequence,
            "token": None if at_tokens is None else at_tokens.token,
            "token_id": None if at_tokens is None else at_tokens.token_id,
        }


def read_recorded(record: RecordedStep) -> Replayed:
    """Read what the run recorded of a step; hidden states as sketches."""
    has_all = all(logprobs_of_rollout is not None for logprobs_of_rollout in record.prev_logprobs)
    logprobs = torch.from_numpy(record.place_at_sampled(record.prev_logprobs)) if has_all else None
    figures = record.figures
    if figures is None:
        return Replayed(logprobs, None, [], {})
    result = TrainResult(figures.loss, figures.grad_norm, figures.learning_rate)
    return Replayed(logprobs, result, figures.tensors, *_read_recorded_states(record, figures.states), is_sketched=True)


def _read_recorded_states(
    record: RecordedStep, states: Sequence[StateFigure]
) -> tuple[dict[str, Tensor], NDArray[np.int64]]:
    """Order recorded sketches: [captured, SKETCH] by point, and the tokens, [captured]."""
    tokens = int(record.lengths.sum())
    for state in states:
        if not 0 <= state.token < tokens or len(state.sketch) != SKETCH:
            text = f"a hidden state at token {state.token} of {tokens}, in {len(state.sketch)} numbers"
            raise ValueError(f"the record of step {record.step} has {text}, which no run writes")
    captured = np.unique(np.array([state.token for state in states], dtype=np.int64))
    rows: dict[str, Tensor] = {
        point: torch.full((len(captured), SKETCH), torch.nan)
        for point in sorted({state.point for state in states}, key=locate_point)
    }
    for state in states:
        rows[state.point][int(np.searchsorted(captured, state.token))] = torch.tensor(state.sketch)
    return rows, captured


def choose_tolerances(*policies: PolicyConfig) -> dict[Quantity, float]:
    """Choose the tolerances of the coarsest precision of the sides."""
    if any(policy.fp8.format != "off" or policy.quantization is not None for policy in policies):
        return TOLERANCES["fp8"]
    return TOLERANCES["bfloat16" if any(policy.precision == "bfloat16" for policy in policies) else "float32"]


def compare(
    names: tuple[str, str], record: RecordedStep, sides: tuple[Replayed, Replayed], limits: Mapping[Quantity, float]
) -> Comparison:
    """Compare all that both sides have, in the order of computation.

    Args:
        names: names of the sides, for the report.
        record: the step, from which tokens are named.
        sides: what each side computed; the second one's numbers are the scale of relative differences.
        limits: the tolerances.
    """
    first, second = sides
    differences: list[Difference] = [
        *_compare_tensors("weights", "weight", sides, limits),
        *_compare_hidden_states(record, sides, limits),
    ]
    if first.logprobs is not None and second.logprobs is not None:
        # By rounding, a sampling filter may remove a token at its edge on one side only.
        removed = first.logprobs.isneginf() | second.logprobs.isneginf()
        apart = (first.logprobs - second.logprobs).abs().masked_fill(removed, 0.0)
        tail = ROUTED_LOGPROBS_TAIL if _has_experts(sides) else LOGPROBS_TAIL
        limit, tokens = limits["log-probabilities"], np.flatnonzero(record.sampled)
        apart = apart[torch.from_numpy(tokens)]
        differences.append(
            _describe_at_token(
                record, "log-probabilities", None, apart, limit, tokens, tail if _is_coarse(limits) else None
            )
        )
    if first.result is not None and second.result is not None:
        first_result, second_result = first.result, second.result
        # A loss may be close to 0, where a relative difference says nothing, so it is taken relative to at least 1.
        loss = abs(first_result.loss - second_result.loss) / max(1.0, abs(second_result.loss))
        norm = abs(first_result.grad_norm - second_result.grad_norm) / (second_result.grad_norm or 1.0)
        differences.append(Difference("loss", loss, limits["loss"]))
        differences.append(Difference("gradient norm", norm, limits["gradient norm"]))
    differences += _compare_tensors("gradients", "gradient", sides, limits)
    differences += _compare_update(sides, limits["update"])
    return Comparison(*names, differences)


def _is_coarse(limits: Mapping[Quantity, float]) -> bool:
    """True for the tolerances of a precision coarser than float32."""
    return limits["hidden states"] > TOLERANCES["float32"]["hidden states"]


def _compare_hidden_states(
    record: RecordedStep, sides: tuple[Replayed, Replayed], limits: Mapping[Quantity, float]
) -> Iterator[Difference]:
    """Yield the first point beyond the limit, else the most different."""
    # Tokens that predict nothing are left out. So are, from a router on, tokens that the two sides send to other
    # experts, if they are so few that rounding explains them (`TIES`).
    limit, is_coarse = limits["hidden states"], _is_coarse(limits)
    captured = np.intersect1d(sides[0].captured, sides[1].captured)
    captured = captured[record.predicts[captured]]
    largest: Difference | None = None
    for point in (name for name in sides[0].hidden if name in sides[1].hidden):
        rows, second_rows = _find_states_at(point, sides, captured)
        if is_coarse and point.endswith(ROUTER):
            # A router's state is 0 at experts that were not chosen, so other zeros mean other experts.
            moved = ((rows != 0) != (second_rows != 0)).any(dim=1)
            if int(moved.sum()) <= max(FEWEST_TIES, TIES * len(captured)):
                captured, rows, second_rows = captured[~moved.numpy()], rows[~moved], second_rows[~moved]
        if not len(captured):
            break
        scale = second_rows.norm(dim=1)
        finite = scale[scale.isfinite()]
        apart = (rows - second_rows).norm(dim=1) / scale.clamp(min=SMALL * float(finite.mean()) if len(finite) else 1.0)
        tail = STATES_TAIL if is_coarse else None
        difference = _describe_at_token(record, "hidden states", point, apart, limit, captured, tail)
        if not difference.agrees:  # every later point differs because of this one
            yield difference
            return
        if largest is None or difference.difference > largest.difference:
            largest = difference
    if largest is not None:
        yield largest


def _find_states_at(point: str, sides: tuple[Replayed, Replayed], captured: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Select both sides' states at a point, or their sketches.

    Each is [tokens, width or SKETCH], float32.
    """
    as_sketches = any(side.is_sketched for side in sides)

    def read_states(side: Replayed) -> Tensor:
        rows = side.hidden[point][torch.from_numpy(np.searchsorted(side.captured, captured))]
        return (sketch_rows(rows, point) if as_sketches and not side.is_sketched else rows).float()

    return read_states(sides[0]), read_states(sides[1])


def _describe_at_token(
    record: RecordedStep,
    quantity: Quantity,
    tensor: str | None,
    apart: Tensor,
    limit: float,
    numbers: NDArray[np.int64],
    tail: Tail | None,
) -> Difference:
    """Describe a difference by token.

    Args:
        record: the step.
        quantity: the quantity.
        tensor: name of the tensor or of the point; None: it has none.
        apart: [tokens], float32: difference of each token.
        limit: the tolerance.
        numbers: [tokens], int64, ascending: indices of these tokens in the step.
        tail: what rounding may do to single tokens; None: none may exceed the tolerance.
    """
    apart = apart.nan_to_num(nan=math.inf)  # a comparison with NaN is false, so NaN would pass for agreement
    past = torch.nonzero(apart > limit)
    token_index = int(numbers[int(past[0]) if len(past) else int(apart.argmax())])
    sequence = int(np.searchsorted(np.cumsum(record.lengths), token_index, side="right"))
    position = token_index - int(record.lengths[:sequence].sum())
    sequences = [part for trajectory in record.trajectories for part in trajectory.split_segments()]
    token_id = int(sequences[sequence].token_ids[position])
    largest = float(apart.max()) if tail is None else _find_largest(apart, tail)
    return Difference(quantity, largest, limit, tensor, sequence, position, token_id)


def _find_largest(apart: Tensor, tail: Tail) -> float:
    """Find the number that must be within the tolerance by a tail."""
    largest = apart.sort(descending=True).values
    strays = max(1, int(tail.share * len(apart)))
    stray = float(largest[strays]) if strays < len(apart) else 0.0
    return max(stray, float(largest[0]) / tail.times, float(apart.median()) / tail.typical)


Distances = dict[tuple[int, str], tuple[float, float]]
"""By (optimizer step, name): a tensor's distance between the sides, and its norm on the second one."""


def _compute_distances(kind: str, sides: tuple[Replayed, Replayed]) -> Distances:
    """Compute distances from sketches; infinite if only one side has the tensor."""
    first, second = (
        {(figure.optimizer_step, figure.name): figure for figure in side.tensors if figure.kind == kind}
        for side in sides
    )
    if not first or not second:
        return {}
    distances = {}
    for key in first.keys() | second.keys():
        first_figure, second_figure = first.get(key), second.get(key)
        if first_figure is None or second_figure is None:
            distances[key] = (math.inf, 1.0)
        else:
            apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(first_figure.sketch, second_figure.sketch, strict=True)))
            distances[key] = (apart, second_figure.norm)
    return distances


def _compare_tensors(
    quantity: Quantity, kind: str, sides: tuple[Replayed, Replayed], limits: Mapping[Quantity, float]
) -> Iterator[Difference]:
    """Yield the largest difference, with the first tensor beyond the limit."""
    # In a coarse precision rounding sends tokens to other experts. So the gradients of a layer's experts and router are
    # compared together, and the difference of every gradient is divided by `EXPERT_GRADIENT`.
    figures, limit = _compute_distances(kind, sides), limits[quantity]
    if not figures:
        return
    # By optimizer step, the norm of all tensors together.
    total = {step: math.hypot(*(norm for (of, _), (_, norm) in figures.items() if of == step)) for step, _ in figures}
    is_routed = kind == "gradient" and _is_coarse(limits) and _has_experts(sides)
    if is_routed:
        figures = _with_experts_together(figures)
    apart = {
        (step, name): distance / (max(norm, SMALL * total[step]) or 1.0)
        for (step, name), (distance, norm) in figures.items()
    }
    if is_routed:
        apart = {key: value / EXPERT_GRADIENT for key, value in apart.items()}
    sign = -1 if kind == "gradient" else 1  # gradients are computed from the last layer to the first
    order = sorted(apart, key=lambda key: (key[0], sign * find_layer(key[1]), key[1]))
    worst = max(order, key=lambda key: math.inf if math.isnan(apart[key]) else apart[key])
    past = [key for key in order if not apart[key] <= limit]
    yield Difference(quantity, apart[worst], limit, (past[0] if past else worst)[1])


def _with_experts_together(figures: Distances) -> Distances:
    """Combine a layer's router and experts, under the name of the worst."""
    # A token that rounding sends to another expert moves gradient from one expert to the other; their sum stays.
    together = {key: figure for key, figure in figures.items() if not _is_routed(key[1])}
    layers: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for step, name in figures.keys() - together.keys():
        layers.setdefault((step, find_layer(name)), []).append((step, name))
    for keys in layers.values():
        distances, norms = zip(*(figures[key] for key in keys), strict=True)
        together[max(keys, key=lambda key: (figures[key][0], key))] = math.hypot(*distances), math.hypot(*norms)
    return together


def _has_experts(sides: tuple[Replayed, Replayed]) -> bool:
    return any(_is_routed(figure.name) for side in sides for figure in side.tensors)


def _is_routed(name: str) -> bool:
    return ".experts." in name or ".gate." in name or ".router." in name


def _compare_update(sides: tuple[Replayed, Replayed], limit: float) -> Iterator[Difference]:
    """Compare the change of all weights together, and name the worst tensor."""
    # Not tensor by tensor: where the gradient is zero but for rounding, Adam's first steps are as large as elsewhere.
    figures = _compute_distances("update", sides)
    if figures:
        distance = math.hypot(*(apart for apart, _ in figures.values()))
        norm = math.hypot(*(norm for _, norm in figures.values()))
        worst = max(figures, key=lambda key: figures[key][0])
        yield Difference("update", distance / (norm or 1.0), limit, worst[1])
