"""A recorded side, the oracle for it, and what an explanation of its record is."""

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
    """An explanation of a side's record."""

    name: str
    """Name for programs, such as stale_tensor."""
    cause: Cause
    text: str
    """What would be wrong, as the rest of a sentence that begins with the side: "the engine ..."."""
    key: str
    """The configuration key to change, or another remedy."""
    assumes: int = 1
    """Number of parts of the model, and of fitted numbers, that have to be wrong together."""


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
        """The side with some of its rollouts."""
        pieces = self.recorded.split(self.lengths)
        return replace(
            self,
            rollouts=[self.rollouts[number] for number in numbers],
            tokens=[self.tokens[number] for number in numbers],
            recorded=torch.cat([pieces[number] for number in numbers]),
        )

    def predict(self, **changes: Any) -> Tensor:
        """The oracle's log-probabilities, [tokens], float32; `changes`: fields of the side."""
        side = replace(self, **changes) if changes else self
        return side.oracle.compute_logprobs(side.tokens, [side.law])[0]


Candidate = tuple[Suspect, Callable[[Side], Tensor]]
"""A suspect, and what it predicts for a side or for some of its rollouts: [tokens], float32."""
Group = Callable[[Side], Iterator[Candidate]]
"""Suspects of one kind; numbers that a suspect fits are fitted to the side that the group gets."""


Predictions = Callable[[Sequence[float]], Iterable[Tensor]]
"""From numbers to the log-probabilities, [tokens], float32, that follow from each."""


FITTED = 2e-6
"""Mean difference, in nats, at which a fitted number is good enough."""


def fit(side: Side, tried: Sequence[float], predict: Predictions, rounds: int = 8) -> float:
    """The number under which the record is predicted best.

    Args:
        side: the record.
        tried: numbers in ascending order that are tried first; the search goes on between the neighbours of the best.
        predict: the log-probabilities that follow from numbers.
        rounds: most times that numbers are tried; fewer if the best one predicts the record, or no longer improves.
    """
    # The error need not have one minimum, so a grid is refined around its best number; a method that follows the slope
    # would stop at the first minimum.
    best, before, stalled = tried[0], math.inf, 0
    for _ in range(rounds):
        errors = [float(compute_residual(side.recorded, logprobs).mean()) for logprobs in predict(tried)]
        at = min(range(len(tried)), key=errors.__getitem__)
        stalled = stalled + 1 if errors[at] > 0.9 * before else 0
        if errors[at] < FITTED or stalled > 1:
            return tried[at]
        before = min(before, errors[at])
        low, best, high = tried[max(at - 1, 0)], tried[at], tried[min(at + 1, len(tried) - 1)]
        tried = sorted({low + (high - low) * part / 12 for part in range(13)} | {best})
    return best


def fit_law(side: Side, tried: Sequence[float], law_of: Callable[[float], Law], rounds: int = 8) -> float:
    """Fit the number of a distribution to the record, as `fit` does."""
    return fit(
        side,
        tried,
        lambda numbers: side.oracle.compute_logprobs(side.tokens, [law_of(number) for number in numbers]),
        rounds,
    )
