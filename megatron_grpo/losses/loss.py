"""What a loss is to the ranks that train with it: a share of the optimizer step's loss, divided by global counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.data.batch import TokenFields
from megatron_grpo.data.step_batch import StepBatch

if TYPE_CHECKING:
    from megatron_grpo.config.loss_schema import LossConfig


@dataclass(frozen=True, slots=True)
class Segments:
    """The sequences that the tokens of a flat microbatch, [tokens], belong to.

    Context-parallel ranks each hold some tokens of every sequence. What speaks of a whole sequence is added up over
    them; it has no gradient, so that nothing has to flow back.
    """

    of_token: Tensor
    """[tokens], int64: number of the token's sequence in the microbatch."""
    sizes: Tensor
    """[sequences], float32: tokens in the loss of each whole sequence, on all ranks that share it."""
    join: Callable[[Tensor], Tensor] | None = None
    """[sequences] of this rank's part -> [sequences] of all parts; None: this rank has whole sequences."""

    @torch.no_grad()
    def totals(self, values: Tensor) -> Tensor:
        """[tokens], float32, 0 outside the loss -> [tokens], without gradient: sum over each token's whole sequence."""
        sums = torch.zeros_like(self.sizes, dtype=values.dtype).index_add_(0, self.of_token, values)
        return (sums if self.join is None else self.join(sums))[self.of_token]

    @property
    def size_of_token(self) -> Tensor:
        """[tokens], float32: tokens in the loss of each token's sequence, at least 1."""
        return self.sizes.clamp(min=1)[self.of_token]


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


MAX_LOG_RATIO = 40.0
"""Where log ratios of probabilities are cut off: e^40 = 2e17 and its square are float32 numbers. Such a ratio is a
defect, or of a response so long that its weight means nothing; infinite, it would turn an advantage of 0 into NaN."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Log ratios [...] of any shape, floating point, limited to +- MAX_LOG_RATIO; beyond that the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of log ratios [...] of any shape, floating point, first limited to +- MAX_LOG_RATIO: always finite."""
    return bounded(log_ratio).exp()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values inside a mask and 0 outside it, whatever stands there, infinities and NaN included.

    Values [...] of any shape and dtype; mask [...], bool, in the shape of the values.
    """
    # A product with the mask would keep NaN, and its gradient too; where() cuts both.
    return torch.where(mask, values, torch.zeros_like(values))


def token_mean(values: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """[...], any dtype, and a bool mask of that shape -> []: a microbatch's share of the mean over a step's tokens."""
    return (values * mask).sum() / counts.tokens


def response_sum(values: Tensor, mask: Tensor, segments: Segments | None) -> Tensor:
    """Sum over each response's tokens in the mask, at every token of the response, without gradient.

    Args:
        values: [sequences, length], or flat [tokens], float32.
        mask: bool, in the shape of the values: tokens in the loss.
        segments: the sequences of a flat microbatch; None: the rows are the sequences.
    """
    kept = (values * mask).detach()
    return kept.sum(dim=1, keepdim=True).expand_as(values) if segments is None else segments.totals(kept)


def remaining_sum(values: Tensor, mask: Tensor, segments: Segments | None) -> Tensor:
    """Sum over a token and those of its response after it, as far as they are in the mask, without gradient.

    Args:
        values: [sequences, length], or flat [tokens], float32.
        mask: bool, in the shape of the values: tokens in the loss.
        segments: the sequences of a flat microbatch, one after the other; None: the rows are the sequences.

    Raises:
        ValueError: ranks share the sequences, and each has only some of a response's tokens.
    """
    kept = (values * mask).detach().double()  # sums over a whole microbatch are subtracted from one another
    onwards = kept.flip(-1).cumsum(-1).flip(-1)
    if segments is None:
        return onwards.to(values.dtype)
    if segments.join is not None:
        raise ValueError("what follows a token is on other ranks with context parallelism")
    sums = torch.zeros_like(segments.sizes, dtype=kept.dtype).index_add_(0, segments.of_token, kept)
    later = sums.flip(0).cumsum(0).flip(0) - sums
    return (onwards - later[segments.of_token]).to(values.dtype)


def response_mean(values: Tensor, mask: Tensor, segments: Segments | None) -> Tensor:
    """Mean over each response's tokens in the mask, at every token of the response, without gradient.

    Args:
        values: [sequences, length], or flat [tokens], float32.
        mask: bool, in the shape of the values: tokens in the loss.
        segments: the sequences of a flat microbatch; None: the rows are the sequences.
    """
    return response_sum(values, mask, segments) / response_size(mask, segments)


def response_size(mask: Tensor, segments: Segments | None) -> Tensor:
    """Tokens in the loss of each token's response, at least 1; [sequences, 1] for rows and [tokens] for segments.

    Args:
        mask: [sequences, length], or flat [tokens], bool: tokens in the loss.
        segments: the sequences of a flat microbatch; None: the rows are the sequences.
    """
    # At least 1: a response outside the loss has mean 0, not NaN, which times a mask of 0 would still be NaN.
    return mask.sum(dim=1, keepdim=True).clamp(min=1) if segments is None else segments.size_of_token


def loss_share(
    loss: Tensor, mask: Tensor, counts: GlobalCounts, config: LossConfig, segments: Segments | None
) -> Tensor:
    """A microbatch's part of the step's loss, shape []: T tokens, n_i of them in sequence i, in N of all M sequences::

        token_level_loss             sum_it loss_it / T           (DAPO, Yu et al. 2025, eq. 12)
        token_level_loss=false       sum_i (sum_t loss_it / n_i) / N    (GRPO, Shao et al. 2024, eq. 3)
        constant_normalizer_tokens   sum_it loss_it / (M * constant)    (Dr. GRPO, Liu et al. 2025, section 3.2)

    Args:
        loss: [sequences, length], or flat [tokens], float32, with gradient: loss of each token.
        mask: bool, in the shape of the loss: tokens in the loss.
        counts: what losses are divided by, counted over the whole optimizer step.
        config: which of the three averages.
        segments: the sequences of a flat microbatch; None: the rows are the sequences.
    """
    # Divided by counts of the step, never of the microbatch: shares add up to one loss under any packing and layout.
    if config.constant_normalizer_tokens is not None:
        return (loss * mask).sum() / (counts.all_sequences * config.constant_normalizer_tokens)
    if config.token_level_loss:
        return token_mean(loss, mask, counts)
    if segments is None:  # row by row, as the definition has it
        return ((loss * mask).sum(dim=1, keepdim=True) / response_size(mask, None)).sum() / counts.sequences
    return (loss * mask / response_size(mask, segments)).sum() / counts.sequences
