"""A side's record with its oracle, the suspects that may explain it, and how their numbers are fitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_grpo.verification.doctor.evidence import Rollout
from megatron_grpo.verification.doctor.law import Law, Tokens, compute_residual
from megatron_grpo.verification.oracle import Oracle

Cause = Literal[
    "tokens", "record", "weights", "precision", "layer", "layout", "sampling", "staleness", "routing", "unexplained"
]
"""Kinds of reasons why training and generation differ."""
SideName = Literal["engine", "trainer"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A possible cause of a side's difference from the oracle."""

    name: str
    """Name for programs, such as stale_tensor."""
    cause: Cause
    text: str
    """What would be wrong, as the rest of a sentence that begins with the side: "the engine ..."."""
    key: str
    """The configuration key to change, or another remedy."""
    assumes: int = 1
    """Independent assumptions: parts of the model that are wrong together, and fitted numbers. Fewer are better."""
    only_exact: bool = False
    """Whether it counts only if it reproduces the record: of many thousand changes some come near by chance."""
    tensors: int = 1
    """Tensors whose numbers it changes. Of some no number matters, as before a norm: then fewer are better."""


@dataclass(frozen=True, slots=True)
class Side:
    """A source of recorded log-probabilities, and the oracle for it."""

    name: SideName
    oracle: Oracle
    rollouts: Sequence[Rollout]
    tokens: Sequence[Tokens]
    """The sequences of the rollouts, or with other prompts."""
    law: Law
    """The sampling distribution of the configuration."""
    recorded: Tensor
    """[tokens], float32."""

    @property
    def lengths(self) -> list[int]:
        """Scored tokens of each rollout."""
        return [len(rollout.indices) for rollout in self.rollouts]

    def select_rollouts(self, numbers: Sequence[int]) -> Side:
        """Keep some of the rollouts, by index."""
        pieces = self.recorded.split(self.lengths)
        return replace(
            self,
            rollouts=[self.rollouts[number] for number in numbers],
            tokens=[self.tokens[number] for number in numbers],
            recorded=torch.cat([pieces[number] for number in numbers]),
        )

    def predict(self, **changes: Any) -> Tensor:
        """Compute the oracle's log-probabilities, [tokens], float32, with changed fields."""
        side = replace(self, **changes) if changes else self
        return side.oracle.compute_logprobs(side.tokens, [side.law])[0]


Candidate = tuple[Suspect, Callable[[Side], Tensor]]
"""A suspect, and its prediction for a side, or for some rollouts of it: [tokens], float32."""
Group = Callable[[Side], Iterator[Candidate]]
"""Yields suspects of one kind, whose free numbers are fitted to the given side."""


Predictions = Callable[[Sequence[float]], Iterable[Tensor]]
"""From numbers to the log-probabilities under each, [tokens], float32."""


FITTED = 2e-6
"""Mean difference, in nats, at which a fitted number is good enough."""


def fit(side: Side, tried: Sequence[float], predict: Predictions, rounds: int = 8) -> float:
    """Find the number under which the record is predicted best.

    Args:
        side: the record.
        tried: the first grid of numbers, ascending.
        predict: the log-probabilities under numbers.
        rounds: most grids; fewer if the best number predicts the record, or no longer improves.
    """
    # The error may have several minima, so each grid refines the last one around its best number; a method that follows
    # the slope would stop at the first minimum.
    best, before, stalled = tried[0], math.inf, 0
    for _ in range(rounds):
        errors = [float(compute_residual(side.recorded, logprobs).mean()) for logprobs in predict(tried)]
        at = min(range(len(tried)), key=errors.__getitem__)
        stalled = stalled + 1 if errors[at] > 0.9 * before else 0
        if errors[at] < FITTED or stalled > 1:
            return tried[at]
        before = min(before, errors[at])
        low, best, high = tried[max(at - 1, 0)], tried[at], tried[min(at + 1, len(tried) - 1)]
        # A neighbour that is the best number but for rounding would hide one side of it.
        grid = (low + (high - low) * step / 12 for step in range(13))
        tried = sorted([best, *(number for number in grid if abs(number - best) > (high - low) / 50)])
    return best


def fit_law(side: Side, tried: Sequence[float], law_of: Callable[[float], Law], rounds: int = 8) -> float:
    """Fit a parameter of the distribution; arguments are those of `fit`."""
    return fit(
        side,
        tried,
        lambda numbers: side.oracle.compute_logprobs(side.tokens, [law_of(number) for number in numbers]),
        rounds,
    )
