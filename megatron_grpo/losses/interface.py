"""What a loss is to the ranks that train with it: a share of the optimizer step's loss, divided by global counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import add
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.data.batch import StepBatch, TokenFields
from megatron_grpo.losses.segments import Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """What losses and metrics of one optimizer step are divided by, over all ranks and microbatches."""

    tokens: float
    """Tokens in the loss (sum of loss_mask), at least one."""
    sequences: float
    """Sequences with at least one token in the loss."""
    all_sequences: float
    """All sequences, those without a token in the loss included."""
    positive_tokens: float = 0.0
    """Tokens in the loss of correct responses; 0 when the batch does not say which are correct."""

    @staticmethod
    def of(batch: StepBatch, sequences: NDArray[np.int64]) -> GlobalCounts:
        """The counts of an optimizer step on some sequences of a batch, which have a token in the loss.

        Args:
            batch: the step's batch, with all its sequences.
            sequences: [chosen], int64: numbers of the sequences in this optimizer step.
        """
        tokens = batch.response_tokens[sequences] * batch.in_loss[sequences]
        positive = tokens[batch.positive[sequences]] if batch.positive is not None else tokens[:0]
        counts = GlobalCounts(
            tokens=float(tokens.sum()),
            sequences=float(np.count_nonzero(tokens)),
            all_sequences=float(len(sequences)),
            positive_tokens=float(positive.sum()),
        )
        assert counts.tokens > 0, "an optimizer step needs a token to learn from"
        return counts


class LossFunction(Protocol):
    """A loss over one microbatch whose sum over all microbatches and ranks is the loss of the step."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the stored entries (`STORED_DTYPES`) that the loss is computed from; absent ones are left out."""

    def __call__(
        self, curr_logprobs: Tensor, /, tokens: TokenFields, counts: GlobalCounts, segments: Segments | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of the step's loss and metrics that one microbatch has.

        Args:
            curr_logprobs: [sequences, length], or flat [tokens], float32, with gradient: of the token at its place.
                What a value model trains on gets values here.
            tokens: entries that the loss reads and loss_mask, each in the shape of curr_logprobs, zero on padding;
                positive when the batch says which responses are correct; of a policy also entropy.
            counts: what losses and metrics are divided by, counted over the whole optimizer step.
            segments: the sequences of a flat microbatch; None: the rows are the sequences.

        Returns:
            The microbatch's share of the loss and of each metric, all of shape []. Shares add up to the step's value;
            a metric whose name ends in _max or _min is reduced by that instead (`combine_metrics`).
        """


def combine_metrics(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics from the shares of the parts: sums, or extremes for names ending in _max or _min."""
    total: dict[str, float] = {}
    join: dict[str, Callable[[float, float], float]] = {}
    for share in shares:
        for name, value in share.items():
            if name in total:
                total[name] = join[name](total[name], value)
            else:  # looked at once: the driver comes by here for every metric of every microbatch
                total[name] = value
                join[name] = max if name.endswith("_max") else min if name.endswith("_min") else add
    return total


def is_extreme(name: str) -> bool:
    """Whether a metric is a maximum or minimum rather than a mean."""
    return name.endswith(("_max", "_min"))
