"""The interface of losses: the shares of microbatches add up, since all are divided by counts of the whole step.

Per-token tensors come in two forms. Ranks train on flat microbatches: [tokens], with `Segments` that say which sequence
each token belongs to. Without segments (None) they are rectangles, [sequences, length], whose rows are the sequences;
definitions and oracles are written that way. A mask is bool in the shape of the values: the tokens in the loss.

Every microbatch on every rank divides its sums by counts of the whole step (`GlobalCounts.count` says why), so the
shares add up over microbatches and ranks. Quantities of a whole sequence (its mean, its probability ratio) are first
summed over the context-parallel ranks that share it, by `Segments.sum_over_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import add
from pkgutil import resolve_name
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.config.started_values import list_code_folders


@dataclass(frozen=True, slots=True)
class Segments:
    """The sequences of the tokens in a flat microbatch.

    Context-parallel ranks each hold some tokens of every sequence. Sums over whole sequences are taken over these ranks
    and have no gradient, so that backward needs no communication.
    """

    sequence_index: Tensor  # [tokens], int64: index of each token's sequence in the microbatch
    sizes: Tensor  # [sequences], float32: tokens in the loss of each whole sequence, on all ranks that share it
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Sums [sequences] over the context-parallel ranks that share them; None: this rank has whole sequences."""
    order: Tensor | None = None
    """[tokens], int64: place of each token in the loss among those of all ranks that share the sequences, which lie end
    to end. None: this rank has all of them, in order."""
    count: int = 0  # tokens in the loss of all these ranks, with `order`

    @torch.no_grad()
    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Sum of values over each token's whole sequence, [tokens]."""
        sums = torch.zeros_like(self.sizes, dtype=values.dtype).index_add_(0, self.sequence_index, values)
        return (sums if self.sum_over_ranks is None else self.sum_over_ranks(sums))[self.sequence_index]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """Denominators of losses and metrics of a whole optimizer step."""

    tokens: float  # tokens in the loss (sum of loss_mask), at least one
    sequences: float  # rollouts with at least one token in the loss, each counted with its weight
    all_sequences: float  # all rollouts, those without a token in the loss included, each counted with its weight
    positive_tokens: float = 0.0
    """Tokens in the loss of correct responses, counted with their weights; 0 if the batch marks none."""
    imitated_tokens: float = 0.0  # tokens that others wrote and the loss imitates, counted with their weights
    token_weight: float = 1.0  # mean weight of the tokens in the loss

    @staticmethod
    def count(batch: StepBatch, sequences: NDArray[np.int64]) -> GlobalCounts:
        """Count for an optimizer step on these `sequences` of a batch: [chosen], indices."""
        # Why global counts: with T tokens in the loss of a step, the mean over tokens is sum(loss) / T. A microbatch
        # that divided by its own count t would contribute the mean of a part, and the average of such means weighs a
        # token by 1 / (t * number of microbatches): tokens in short microbatches count more, and the result changes
        # with packing, with the number of microbatches and of data-parallel ranks, and with context parallelism, where
        # a rank holds some tokens of every sequence. So the driver, which knows all lengths and masks, counts once per
        # optimizer step. Megatron-Core must therefore not average: gradients are summed over microbatches,
        # context-parallel and data-parallel ranks (calculate_per_token_loss, a token count of 0, and
        # `finalize_model_grads_func` in `trainer.optimizer`).
        tokens = batch.response_tokens[sequences] * batch.in_loss[sequences]
        assert tokens.sum() > 0, "an optimizer step needs a token to learn from"
        weights = (
            np.ones(len(sequences)) if batch.loss_weights is None else batch.loss_weights[sequences].astype(np.float64)
        )
        weighted = tokens * weights
        # The segments of a rollout count as one sequence together.
        shares = weights if batch.rollout_shares is None else weights * batch.rollout_shares[sequences]
        positive = weighted[batch.positive[sequences]] if batch.positive is not None else weighted[:0]
        imitated, of_policy = np.zeros(len(sequences)), np.ones(len(sequences), dtype=np.bool_)
        if batch.imitated_tokens is not None:
            is_learnt = batch.in_loss if batch.demonstrated is None else batch.demonstrated
            imitated = batch.imitated_tokens[sequences] * is_learnt[sequences] * weights
        if batch.demonstrated is not None:
            of_policy = ~batch.demonstrated[sequences]
        return GlobalCounts(
            tokens=float(tokens.sum()),
            sequences=float(shares[tokens > 0].sum()),
            all_sequences=float(shares[of_policy].sum()),
            positive_tokens=float(positive.sum()),
            imitated_tokens=float(imitated.sum()),
            token_weight=float(weighted.sum() / tokens.sum()),
        )


class LossFunction(Protocol):
    """A loss of microbatches; the sum over all is the step's loss."""

    @property
    def field_names(self) -> tuple[str, ...]:
        """Stored fields (`STORED_DTYPES`) that the loss reads; a batch may lack some."""

    def __call__(
        self, curr_logprobs: Tensor, /, tokens: TokenFields, counts: GlobalCounts, segments: Segments | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute one microbatch's share of the step's loss and metrics.

        Args:
            curr_logprobs: [sequences, length], or flat [tokens], float32, with gradient: log-probability of each token;
                for a value model the value before it.
            tokens: the fields that the loss reads and loss_mask, each in the shape of curr_logprobs, zero on padding;
                positive if the batch marks correct responses, imitated if it has tokens to imitate; for a policy
                also entropy.

        Returns the shares of loss and metrics, all of shape []. Shares add up to the step's value; a metric whose name
        ends in _max or _min is reduced by that instead (`combine_metrics`).
        """


def make_loss(config: Config) -> LossFunction:
    """Make the loss of a run's algorithm."""
    loss: Callable[..., LossFunction] = resolve_name(config.method.loss)
    return loss(config.loss_fn, list_code_folders(config)) if config.method.reads_loss else loss()


def combine_metrics(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add shares of metrics; of names in _max or _min take the extreme."""
    total: dict[str, float] = {}
    combine: dict[str, Callable[[float, float], float]] = {}
    for share in shares:
        for name, value in share.items():
            if name in total:
                total[name] = combine[name](total[name], value)
            else:  # the name is parsed once: the driver does this for every metric of every microbatch
                total[name] = value
                combine[name] = max if name.endswith("_max") else min if name.endswith("_min") else add
    return total


def is_extreme(name: str) -> bool:
    """True if a metric is a maximum or minimum, not a mean."""
    return name.endswith(("_max", "_min"))


MAX_LOG_RATIO = 40.0
"""Limit of log ratios of probabilities: e^40 = 2e17 and its square are float32 numbers. A larger ratio is a defect, or
belongs to a response so long that its weight is meaningless; infinite, it would turn an advantage of 0 into NaN."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Exponential of log ratios within +- MAX_LOG_RATIO; beyond, the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def mask_values(values: Tensor, mask: Tensor) -> Tensor:
    """Replace values outside the mask, even infinite or NaN, by 0."""
    # A product with the mask would keep NaN, in the value and in the gradient; where() removes it from both.
    return torch.where(mask, values, torch.zeros_like(values))


def token_weights(tokens: TokenFields, mask: Tensor) -> Tensor | float:
    """Weight of each token in the mask; 1 without weights."""
    return 1.0 if tokens.weight is None else mask_values(tokens.weight, mask)


def token_mean(values: Tensor, mask: Tensor, counts: GlobalCounts) -> Tensor:
    """This microbatch's share, shape [], of the step's mean over tokens."""
    return (values * mask).sum() / counts.tokens


def weighted_mean(values: Tensor, mask: Tensor, counts: GlobalCounts, weight: Tensor | float) -> Tensor:
    """This microbatch's share, shape [], of the step's weighted mean over tokens."""
    return (values * weight * mask).sum() / (counts.tokens * counts.token_weight)


def response_sum(values: Tensor, mask: Tensor, segments: Segments | None) -> Tensor:
    """Sum of each response's masked values, at each of its tokens; no gradient."""
    in_loss = mask_values(values, mask).detach()
    if segments is not None:
        return segments.sum_by_sequence(in_loss)
    return in_loss.sum(dim=1, keepdim=True).expand_as(values)


@torch.no_grad()
def onward_sum(values: Tensor, mask: Tensor, segments: Segments | None, discount: float) -> Tensor:
    """Sum of masked values from each token on, discounted by distance; no gradient.

    At token t it is the sum over tokens k >= t of the response of discount^(k - t) times their values; a distance
    counts the tokens in the loss.
    """
    in_loss, is_token = (values * mask).flatten(), mask.flatten()
    sizes = mask.sum(dim=1) if segments is None else segments.sizes
    order, count = is_token.cumsum(0) - 1, len(in_loss)
    if segments is not None and segments.order is not None:
        order, count = segments.order, segments.count
    # Tokens in the loss take their places in the whole sequences, end to end; all others the one behind these. Shapes
    # depend on no number, since plans compute without any.
    slots = torch.where(is_token, order, count)
    laid_out = in_loss.new_zeros(count + 1).index_add_(0, slots, in_loss)
    if segments is not None and segments.sum_over_ranks is not None:
        laid_out = segments.sum_over_ranks(laid_out)  # each rank has its own tokens, and 0 elsewhere
    ends = sizes.long().cumsum(0)
    sequence_index = torch.searchsorted(ends, torch.arange(count + 1, device=ends.device), right=True)
    sums = _scan_backwards(laid_out, sequence_index, discount)[slots]
    return torch.where(is_token, sums, torch.zeros_like(sums)).view_as(values)


def _scan_backwards(values: Tensor, sequence_index: Tensor, discount: float) -> Tensor:
    # After a pass each token has the sum over twice as many tokens as before, so that few passes reach the end.
    shift, factor = 1, discount
    while shift < len(values):
        is_shared = sequence_index[shift:] == sequence_index[:-shift]
        later = torch.where(is_shared, values[shift:], torch.zeros_like(values[shift:]))
        values = torch.cat([values[:-shift] + factor * later, values[-shift:]])
        shift, factor = 2 * shift, factor * factor
    return values


def response_size(mask: Tensor, segments: Segments | None) -> Tensor:
    """Tokens in the loss of each response: [sequences, 1] or, flat, [tokens]."""
    # At least 1: a response outside the loss has mean 0, not NaN, which times a mask of 0 would still be NaN.
    if segments is None:
        return mask.sum(dim=1, keepdim=True).clamp(min=1)
    return segments.sizes.clamp(min=1)[segments.sequence_index]


def loss_share(
    loss: Tensor,
    mask: Tensor,
    counts: GlobalCounts,
    config: LossConfig,
    segments: Segments | None,
    weight: Tensor | float = 1.0,
    rollout_share: Tensor | float = 1.0,
) -> Tensor:
    """This microbatch's share of the step's loss, shape [].

    With T tokens in the loss, n_i of them in sequence i, in N of all M sequences::

        token_level_loss             sum_it loss_it / T           (DAPO, Yu et al. 2025, eq. 12)
        token_level_loss=false       sum_i (sum_t loss_it / n_i) / N    (GRPO, Shao et al. 2024, eq. 3)
        constant_normalizer_tokens   sum_it loss_it / (M * constant)    (Dr. GRPO, Liu et al. 2025, section 3.2)

    `loss` is the loss of each token, float32, with gradient; n_i counts the whole sequence, also when ranks share it.
    With weights w_i the loss of sequence i is multiplied by w_i, and T, N and M are sums of weights, so that a sequence
    of weight 1/2 counts half as much as one of weight 1. (NeMo RL's sample_mask is the same weight, but does not
    enter its constant normaliser.) `weight` has w_i at each token, float32.

    A rollout of several segments counts as one sequence i: n_i, N and M count rollouts. `rollout_share` has at each
    token of a segment of n_s tokens its n_s / n_i, so that the segment's mean over n_s becomes a part of the rollout's.
    """
    if config.constant_normalizer_tokens is not None:
        return (loss * weight * mask).sum() / (counts.all_sequences * config.constant_normalizer_tokens)
    if config.token_level_loss:
        return weighted_mean(loss, mask, counts, weight)
    loss = loss * weight * rollout_share
    if segments is None:  # row by row, as the definition has it
        return ((loss * mask).sum(dim=1, keepdim=True) / response_size(mask, None)).sum() / counts.sequences
    return (loss * mask / response_size(mask, segments)).sum() / counts.sequences
