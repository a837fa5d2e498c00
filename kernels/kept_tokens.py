"""The tokens that top-k, top-p and min-p keep of a vocabulary that ranks share, as vLLM chooses them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo_kernels.head import CHUNK_NUMBERS
from megatron_grpo_kernels.token_filter import TokenFilter

# Likeliest entries of each rank's part of the vocabulary that are looked at first. Where a filter keeps more, which is
# rare, a token's whole vocabulary is gathered and sorted: the result is exact in both cases.
CANDIDATES = 1024


class Bounds(NamedTuple):
    """Kept tokens: all above the cut, and some at the cut."""

    top: Tensor  # [rows], float32: the highest logit
    cut: Tensor  # [rows], float32: the lowest kept logit
    share: Tensor
    """[rows], float32: share of the tokens at the cut that is kept.

    Below 1 where top-p ends among equally likely tokens: vLLM keeps any of them, only their number is certain.
    """


def mask_removed_(weights: Tensor, logits: Tensor, cut: Tensor, share: Tensor) -> Tensor:
    """Multiply weights by 1 above the cut, the share at it, 0 below.

    In place. `weights` and `logits` are [rows, n], `cut` and `share` [rows], all float32. A NaN logit is kept.
    """
    weights.masked_fill_(logits < cut[:, None], 0.0)
    return weights.mul_(torch.where(logits == cut[:, None], share[:, None], 1.0))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """This rank's part of a vocabulary."""

    start: int  # first entry of the part
    rows: int  # entries of a part, padding included; equal on all ranks
    group: dist.ProcessGroup | None  # ranks that together have the vocabulary; None: this rank has all of it

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a tensor over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(values, operation, group=self.group)
        return values

    def join_parts(self, values: Tensor) -> Tensor:
        """Join each rank's [rows, n] to [rows, ranks * n], by vocabulary order."""
        if self.group is None:
            return values
        parts = [torch.empty_like(values) for _ in range(self.group.size())]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


@torch.no_grad()
def find_kept_bounds(
    logits: Tensor, token_filter: TokenFilter, vocabulary: Vocabulary, candidates: int = CANDIDATES
) -> Bounds:
    """Find which tokens a filter keeps; collective over the ranks of the vocabulary.

    The order is vLLM's: logits come after the temperature; then min-p, top-k, and top-p of the rest. top-p removes
    the least likely tokens whose probabilities add up to no more than 1 - top_p.

    `logits`: [rows, columns], float32: this rank's part of the vocabulary, at least one row; a rank may have 0 columns.
    `candidates`: likeliest entries of each rank to look at first.
    """
    highest = logits.amax(dim=1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    top = vocabulary.reduce(highest, dist.ReduceOp.MAX)
    if token_filter.min_p > 0:
        lowest = top + math.log(token_filter.min_p)
        logits = logits.masked_fill(logits < lowest[:, None], -torch.inf)
    else:
        lowest = torch.full_like(top, -torch.inf)
    if token_filter.top_k is None and token_filter.top_p >= 1:
        return Bounds(top, lowest, torch.ones_like(top))
    number = max(candidates, 2 * (token_filter.top_k or 0))
    cut, share, is_exact = _compute_bounds(logits, token_filter, vocabulary, top, min(number, vocabulary.rows))
    if number < vocabulary.rows and not is_exact.all():  # the ranks agree: they have computed this from equal numbers
        ranks = 1 if vocabulary.group is None else vocabulary.group.size()
        # Pieces whose vocabularies may be gathered at once.
        for rows in torch.nonzero(~is_exact)[:, 0].split(max(1, CHUNK_NUMBERS // 8 // (ranks * vocabulary.rows))):
            cut[rows], share[rows], _ = _compute_bounds(
                logits[rows], token_filter, vocabulary, top[rows], vocabulary.rows
            )
    return Bounds(top, torch.maximum(cut, lowest), share)


def _compute_bounds(
    logits: Tensor, token_filter: TokenFilter, vocabulary: Vocabulary, top: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (cut, share at the cut, are both certain), [rows] each."""
    # They follow from the `number` likeliest entries of each rank. Every entry above the lowest candidate of each rank
    # that has more entries is among the candidates. So the bounds are certain if all that is kept is above these.
    values, floor, remainder = _find_candidates(logits, vocabulary, top, number)
    values = vocabulary.join_parts(values).sort(dim=1).values
    is_exact = torch.ones_like(top, dtype=torch.bool)
    if token_filter.top_k is not None:
        kth = values[:, -min(token_filter.top_k, values.shape[1])]
        if token_filter.top_p >= 1:
            return kth, torch.ones_like(kth), is_exact
        is_exact, remainder = (kth > floor) | floor.isneginf(), None
        values = values.masked_fill(values < kth[:, None], -torch.inf)
    if remainder is None:
        probabilities = values.softmax(dim=1)
    else:  # entries that are no candidates come first in the order; together they are like one more entry
        probabilities = torch.cat([(top + remainder.log())[:, None], values], dim=1).softmax(dim=1)
    is_beyond = probabilities.cumsum(dim=1)[:, -values.shape[1] :] <= 1 - values.new_tensor(token_filter.top_p)
    is_beyond[:, -1] = False
    removed = is_beyond.sum(dim=1, keepdim=True)
    cut = values.gather(1, removed)
    ties = (values == cut).sum(dim=1)
    kept_ties = values.shape[1] - removed[:, 0] - (values > cut).sum(dim=1)
    cut = cut[:, 0]
    return cut, kept_ties / ties, is_exact & ((cut > floor) | floor.isneginf())


def _find_candidates(
    logits: Tensor, vocabulary: Vocabulary, top: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Find the likeliest entries of this rank, in no order."""
    # Returns logits, [rows, number], float32, filled up with -inf; the lowest candidate of any rank that has more
    # entries, [rows], -inf without one; and the sum of exp(logit - top) over all entries that are no candidates of any
    # rank, [rows], float32, None if there can be none.
    columns = logits.shape[1]
    floor, remainder = torch.full_like(top, -torch.inf), torch.zeros_like(top)
    if columns > number:
        values, indices = logits.topk(number, dim=1, sorted=False)
        floor, remainder = values.amin(dim=1), logits.sub(top[:, None]).exp_().scatter_(1, indices, 0.0).sum(dim=1)
    else:
        values = torch.nn.functional.pad(logits, (0, number - columns), value=-torch.inf)
    if number >= vocabulary.rows:
        return values, floor, None
    return values, vocabulary.reduce(floor, dist.ReduceOp.MAX), vocabulary.reduce(remainder)
