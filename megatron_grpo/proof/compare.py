"""Compares what two replays of a step computed, or a replay with the record, and finds where they first differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.proof.record import RecordedStep
from megatron_grpo.proof.replay import Replayed
from megatron_grpo.trainer.group import TrainResult

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
"""Largest differences that count as rounding, by the coarsest precision of the sides (docs/replay.md has reasons)."""
SMALL = 1e-3
"""A tensor's difference is taken relative to its norm, or to this share of the norm of all tensors if that is larger:
some gradients are zero but for rounding, such as those of the biases of keys."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one quantity of two sides is apart."""

    quantity: Quantity
    difference: float
    """Absolute for log-probabilities and the loss, else relative."""
    tolerance: float
    tensor: str | None = None
    """The first tensor, in the order of computation, that is past the tolerance; if none is, the one most apart."""
    sequence: int | None = None
    token: int | None = None
    """The first token past the tolerance, or the token most apart if none is: number of its sequence in the step, and
    its position in the sequence."""
    token_id: int | None = None

    @property
    def agrees(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.tolerance  # false for NaN

    @property
    def layer(self) -> int | None:
        """Number of the tensor's layer, from 0; None: it belongs to no layer."""
        found = layer_of(self.tensor or "")
        return found if 0 <= found < _LAST else None


_LAST = 1 << 30


def layer_of(name: str) -> int:
    """Number of the layer in the name of a tensor or of a point: -1 before the first layer, `_LAST` after the last."""
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1])
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
        return all(one.agrees for one in self.differences)

    @property
    def place(self) -> dict[str, str | int | None] | None:
        """Where the sides first differ, in the order of computation; None: they agree.

        Quantity, layer and tensor are those of the first quantity past its tolerance. Point, sequence and token are of
        the first one that has tokens: the first hidden state past its tolerance, or log-probability.
        """
        apart = [one for one in self.differences if not one.agrees]
        if not apart:
            return None
        at_tokens = next((one for one in apart if one.token is not None), None)
        return {
            "quantity": apart[0].quantity,
            "layer": apart[0].layer,
            "tensor": apart[0].tensor,
            "point": None if at_tokens is None else at_tokens.tensor,
            "sequence": None if at_tokens is None else at_tokens.sequence,
            "token": None if at_tokens is None else at_tokens.token,
            "token_id": None if at_tokens is None else at_tokens.token_id,
        }


def recorded(record: RecordedStep) -> Replayed:
    """What the run itself recorded of a step; hidden states are never recorded."""
    known = all(one is not None for one in record.prev_logprobs)
    logprobs = torch.from_numpy(record.at_sampled(record.prev_logprobs)) if known else None
    figures = record.figures
    if figures is None:
        return Replayed(logprobs, None, [], {})
    result = TrainResult(figures.loss, figures.grad_norm, figures.learning_rate)
    return Replayed(logprobs, result, figures.tensors, {})


def tolerances(*policies: PolicyConfig) -> dict[Quantity, float]:
    """The tolerances for sides with these settings: those of the coarsest precision."""
    if any(one.fp8.format != "off" or one.quantization is not None for one in policies):
        return TOLERANCES["fp8"]
    return TOLERANCES["bfloat16" if any(one.precision == "bfloat16" for one in policies) else "float32"]


def compare(
    names: tuple[str, str], record: RecordedStep, sides: tuple[Replayed, Replayed], limits: Mapping[Quantity, float]
) -> Comparison:
    """Compare two sides of a step in everything that both have.

    Args:
        names: names of the sides, for the report.
        record: the step, whose tokens are named.
        sides: what each side computed; the second one's numbers are the scale of relative differences.
        limits: the tolerances.
    """
    first, second = sides
    found: list[Difference] = [
        *_of_tensors("weights", "weight", sides, limits),
        *_of_hidden_states(record, first.hidden, second.hidden, limits["hidden states"]),
    ]
    if first.logprobs is not None and second.logprobs is not None:
        # A filter of sampling may remove a token at its edge on one side only, by rounding.
        removed = first.logprobs.isneginf() | second.logprobs.isneginf()
        apart = (first.logprobs - second.logprobs).abs().masked_fill(removed, 0.0)
        limit = limits["log-probabilities"]
        found.append(_at_token(record, "log-probabilities", None, apart, limit))
    if first.result is not None and second.result is not None:
        one, other = first.result, second.result
        loss = abs(one.loss - other.loss) / max(1.0, abs(other.loss))
        norm = abs(one.grad_norm - other.grad_norm) / (other.grad_norm or 1.0)
        found.append(Difference("loss", loss, limits["loss"]))
        found.append(Difference("gradient norm", norm, limits["gradient norm"]))
    found += _of_tensors("gradients", "gradient", sides, limits)
    found += _of_update(sides, limits["update"])
    return Comparison(*names, found)


def _of_hidden_states(
    record: RecordedStep, first: Mapping[str, Tensor], second: Mapping[str, Tensor], limit: float
) -> Iterator[Difference]:
    """The first point with a token past the limit, or the one most apart; nothing without a common point."""
    largest: Difference | None = None
    for point in (one for one in first if one in second):
        rows, others = first[point].float(), second[point].float()
        scale = others.norm(dim=1)
        kept = scale[scale.isfinite()]
        apart = (rows - others).norm(dim=1) / scale.clamp(min=SMALL * float(kept.mean()) if len(kept) else 1.0)
        apart[rows.isnan().all(dim=1) & others.isnan().all(dim=1)] = 0.0  # these tokens were not captured
        found = _at_token(record, "hidden states", point, apart, limit)
        if not found.agrees:
            yield found
            return
        if largest is None or found.difference > largest.difference:
            largest = found
    if largest is not None:
        yield largest


def _at_token(record: RecordedStep, quantity: Quantity, tensor: str | None, apart: Tensor, limit: float) -> Difference:
    """The difference of a quantity with a number for each token, [tokens], float32, 0 where there is none."""
    apart = apart.nan_to_num(nan=math.inf)
    past = torch.nonzero(apart > limit)
    place = int(past[0]) if len(past) else int(apart.argmax())
    sequence = int(np.searchsorted(np.cumsum(record.lengths), place, side="right"))
    position = place - int(record.lengths[:sequence].sum())
    token_id = int(record.trajectories[sequence].token_ids[position])
    return Difference(quantity, float(apart.max()), limit, tensor, sequence, position, token_id)


Figures = dict[tuple[int, str], tuple[float, float]]
"""By (optimizer step, name): the distance of a tensor between the two sides, and its norm on the second side."""


def _distances(kind: str, sides: tuple[Replayed, Replayed]) -> Figures:
    """Distances of tensors of a kind, from their sketches; infinite for a tensor that only one side has."""
    first, second = (
        {(one.optimizer_step, one.name): one for one in side.tensors if one.kind == kind} for side in sides
    )
    if not first or not second:
        return {}
    found = {}
    for key in first.keys() | second.keys():
        one, other = first.get(key), second.get(key)
        if one is None or other is None:
            found[key] = (math.inf, 1.0)
        else:
            apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(one.sketch, other.sketch, strict=True)))
            found[key] = (apart, other.norm)
    return found


def _of_tensors(
    quantity: Quantity, kind: str, sides: tuple[Replayed, Replayed], limits: Mapping[Quantity, float]
) -> Iterator[Difference]:
    """The largest difference, with the name of the first tensor past the limit in the order of computation.

    Gradients are computed from the last layer to the first.
    """
    figures, limit = _distances(kind, sides), limits[quantity]
    if not figures:
        return
    total = {step: math.hypot(*(norm for (of, _), (_, norm) in figures.items() if of == step)) for step, _ in figures}
    apart = {
        (step, name): distance / (max(norm, SMALL * total[step]) or 1.0)
        for (step, name), (distance, norm) in figures.items()
    }
    sign = -1 if kind == "gradient" else 1
    order = sorted(apart, key=lambda key: (key[0], sign * layer_of(key[1]), key[1]))
    worst = max(order, key=lambda key: math.inf if math.isnan(apart[key]) else apart[key])
    past = [key for key in order if not apart[key] <= limit]
    yield Difference(quantity, apart[worst], limit, (past[0] if past else worst)[1])


def _of_update(sides: tuple[Replayed, Replayed], limit: float) -> Iterator[Difference]:
    """The change of all weights together, and the tensor that contributes most to its difference.

    Not tensor by tensor: where the gradient is zero but for rounding, Adam's first steps are as large as elsewhere.
    """
    figures = _distances("update", sides)
    if figures:
        distance = math.hypot(*(apart for apart, _ in figures.values()))
        norm = math.hypot(*(norm for _, norm in figures.values()))
        worst = max(figures, key=lambda key: figures[key][0])
        yield Difference("update", distance / (norm or 1.0), limit, worst[1])
