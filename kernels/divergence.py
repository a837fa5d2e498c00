"""Divergences of a student from its teacher, from hidden states, chunk by chunk in torch.

With p the student's next-token distribution, q the teacher's, and w the weight of the forward divergence::

    reverse          KL(p || q) = sum_j p_j log(p_j / q_j)
    forward          KL(q || p) = sum_j q_j log(q_j / p_j)
    mixed            w KL(q || p) + (1 - w) KL(p || q)
    jensen_shannon   (1 - w) KL(q || m) + w KL(p || m) with m = (1 - w) q + w p, and at w = 1 forward, at w = 0 reverse

jensen_shannon is the generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2024, eq. 1) and of TRL, whose beta
is 1 - w: TRL, too, takes the two KL divergences at the ends, where the formula itself is 0.

A teacher is known by its head and hidden states, or by its k likeliest tokens. Then both distributions are over these k
tokens and one more entry, the tail, which has the probability of all other tokens (Tail-Aware Top-k On-Policy
Distillation, arXiv 2608.14728; TRL's loss_add_tail). Without the tail the student could move probability out of the k
tokens at no cost. With k = vocabulary there is no tail, and the divergence is the whole one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo_kernels.head import CHUNK_NUMBERS, Head
from megatron_grpo_kernels.logprob import compute_logits, compute_slopes, split_tokens

DivergenceName = Literal["reverse", "forward", "mixed", "jensen_shannon"]
HELD_TENSORS = 4  # of a chunk's logits that are held at once


@dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence of the student, p, from the teacher, q."""

    name: DivergenceName
    forward_weight: float = 0.5  # w above

    def compute_terms(self, logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
        """Compute each entry's term f and p df/dp, up to a constant times p.

        Both are of the shape of the log-probabilities. The gradient by the student's logit z_j is then h_j - p_j sum h,
        where h is the second result.
        """
        p, q, weight = logp.exp(), logq.exp(), self.forward_weight
        if self.name == "reverse" or (self.name == "jensen_shannon" and weight == 0):
            reverse = p * (logp - logq)
            return reverse, reverse
        if self.name == "forward" or (self.name == "jensen_shannon" and weight == 1):
            return q * (logq - logp), -q
        if self.name == "mixed":
            reverse = p * (logp - logq)
            return weight * q * (logq - logp) + (1 - weight) * reverse, (1 - weight) * reverse - weight * q
        logm = torch.log((1 - weight) * q + weight * p)
        # Where both round to 0, so do the terms; the logarithm of their mixture is not finite there.
        is_present = logm.isfinite()
        of_student = torch.where(is_present, weight * p * (logp - logm), 0.0)
        return torch.where(is_present, (1 - weight) * q * (logq - logm), 0.0) + of_student, of_student


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """A teacher's hidden states and head, for its whole distribution."""

    hidden: Tensor  # [tokens, hidden of the teacher], any float type
    weight: Tensor  # [rows of this rank, hidden of the teacher], in that type: the same entries as the student's rows
    cap: float | None = None  # bound of the teacher's logits before they are scaled; None: they have none


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """A teacher's likeliest tokens."""

    token_ids: Tensor  # [tokens, k], int64, different in each row
    logprobs: Tensor  # [tokens, k], float32 or float64: log-probabilities of these tokens
    tail: Tensor | None  # [tokens]: log of the probability of all other tokens; None: these are all tokens


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherStates | TeacherTokens,
    divergence: Divergence,
    *,
    start: int = 0,
    columns: int | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Divergence of softmax(scale * weight @ hidden) from a teacher, at each token.

    Args:
        hidden: [tokens, hidden], any float type, equal on all ranks of the group.
        weight: [rows of this rank, hidden], in the dtype of the hidden states, with as many rows on every rank.
        teacher: whose distribution at the same tokens, of the same scale, the student is compared with.
        divergence: which one.
        start: vocabulary entry of this rank's first row.
        columns: number of rows that are real entries; the rows after them are padding, which is ignored; None: all.
        group: ranks that together hold the vocabulary; None: this rank holds all of it.
        scale: factor of both models' logits, one over the temperature.
        cap: bound of the student's logits before they are scaled, as in `linear_logprobs`; None: they have none.
        chunk_tokens: tokens whose logits are held at once; None: as many as take the memory of 2**26 logits.

    Returns [tokens], float32 (float64 for hidden states in float64). Gradients flow to the hidden states and the
    weight; the former are this rank's part, which adds up over the group. Backward computes each chunk's logits again.
    """
    columns = weight.shape[0] if columns is None else columns
    chunk_tokens = chunk_tokens or max(1, CHUNK_NUMBERS // HELD_TENSORS // weight.shape[0])
    local = hidden.new_zeros(len(hidden), dtype=torch.int64)  # no token is singled out
    head = Head(hidden, weight, columns, local, scale, cap)
    rows = split_tokens(len(hidden), columns, chunk_tokens)
    comparison: _Comparison
    if isinstance(teacher, TeacherStates):
        theirs = Head(teacher.hidden, teacher.weight, columns, local, scale, teacher.cap)
        comparison = _WholeComparison(divergence, theirs, group)
    else:
        comparison = _TopComparison(divergence, teacher, start, group)
    result: Tensor = _LinearDivergence.apply(hidden, weight, head, comparison, rows)
    return result


class _Comparison(ABC):
    """Values and slopes of a divergence for chunks of a head's logits."""

    def __init__(self, divergence: Divergence, group: dist.ProcessGroup | None) -> None:
        self.divergence, self.group = divergence, group

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def find_logsumexp(self, z: Tensor) -> Tensor:
        """Logarithm of the sum of exp(z) over all ranks' columns: [tokens, 1]."""
        highest = z.amax(dim=1, keepdim=True) if z.shape[1] else z.new_full((len(z), 1), -torch.inf)
        if self.group is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        return highest + self.sum_over_ranks((z - highest).exp().sum(dim=1, keepdim=True)).log()

    @abstractmethod
    def compare(self, logp: Tensor, rows: slice) -> tuple[Tensor, ...]:
        """Compute the divergence and what `find_slopes` needs, each [tokens, 1]; collective over the group."""

    @abstractmethod
    def find_slopes(self, logp: Tensor, rows: slice, *kept: Tensor) -> Tensor:
        """Compute the divergence's derivatives by this rank's logits: [tokens, columns]."""


class _WholeComparison(_Comparison):
    def __init__(self, divergence: Divergence, teacher: Head, group: dist.ProcessGroup | None) -> None:
        super().__init__(divergence, group)
        self._teacher = teacher

    def compare(self, logp: Tensor, rows: slice) -> tuple[Tensor, ...]:
        logq = compute_logits(self._teacher, rows).to(logp.dtype)
        logsumexp = self.find_logsumexp(logq)
        terms, slopes = self.divergence.compute_terms(logp, logq - logsumexp)
        value, total = self.sum_over_ranks(torch.stack([terms.sum(dim=1), slopes.sum(dim=1)]))
        return value[:, None], total[:, None], logsumexp

    def find_slopes(self, logp: Tensor, rows: slice, *kept: Tensor) -> Tensor:
        total, logsumexp = kept
        logq = compute_logits(self._teacher, rows).to(logp.dtype) - logsumexp
        return self.divergence.compute_terms(logp, logq)[1] - logp.exp() * total


class _TopComparison(_Comparison):
    def __init__(
        self, divergence: Divergence, teacher: TeacherTokens, start: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(divergence, group)
        self._teacher, self._start = teacher, start

    def _locate(self, logp: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Find (whether a token is on this rank, its column or 0), each [tokens, k]."""
        column = self._teacher.token_ids[rows] - self._start
        is_local = (column >= 0) & (column < logp.shape[1])
        return is_local, torch.where(is_local, column, 0)

    def _take(self, logp: Tensor, rows: slice) -> Tensor:
        """Take this rank's log-probabilities of the teacher's tokens, else 0: [tokens, k]."""
        if not logp.shape[1]:
            return logp.new_zeros(self._teacher.token_ids[rows].shape)
        is_local, column = self._locate(logp, rows)
        return torch.where(is_local, logp.gather(1, column), 0.0)

    def compare(self, logp: Tensor, rows: slice) -> tuple[Tensor, ...]:
        teacher, taken = self._teacher, self.sum_over_ranks(self._take(logp, rows))
        terms, slopes = self.divergence.compute_terms(taken, teacher.logprobs[rows].to(logp.dtype))
        value, total = terms.sum(dim=1, keepdim=True), slopes.sum(dim=1, keepdim=True)
        if teacher.tail is None:
            return value, total, torch.zeros_like(total), torch.zeros_like(total)
        others = logp.exp()
        if logp.shape[1]:
            is_local, column = self._locate(logp, rows)
            # Sums, because tokens of other ranks all have column 0.
            others = others * (torch.zeros_like(logp).scatter_add_(1, column, is_local.to(logp.dtype)) == 0)
        probability = self.sum_over_ranks(others.sum(dim=1, keepdim=True)).clamp(min=torch.finfo(logp.dtype).tiny)
        tail = probability.log()
        of_tail, slope = self.divergence.compute_terms(tail, teacher.tail[rows, None].to(logp.dtype))
        return value + of_tail, total + slope, tail, slope

    def find_slopes(self, logp: Tensor, rows: slice, *kept: Tensor) -> Tensor:
        total, tail, tail_slope = kept
        slopes = -logp.exp() * total
        # A token of the tail has its share of the tail's slope.
        of_others = torch.zeros_like(logp) if self._teacher.tail is None else (logp - tail).exp() * tail_slope
        if logp.shape[1]:
            is_local, column = self._locate(logp, rows)
            taken, zero = self._take(logp, rows), logp.new_zeros(())
            own = self.divergence.compute_terms(taken, self._teacher.logprobs[rows].to(logp.dtype))[1]
            change = torch.where(is_local, own - of_others.gather(1, column), zero)
            slopes.scatter_add_(1, column, change)
        return slopes + of_others


class _LinearDivergence(torch.autograd.Function):
    """Divergences from hidden states, with gradients (`linear_divergence`)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, head: Head, comparison: _Comparison, rows: list[slice]
    ) -> Tensor:
        """Compute divergences; `head` has `hidden` and `weight`, and `rows` are the chunks of tokens."""
        pieces = []
        for chunk in rows:
            z = compute_logits(head, chunk)
            logsumexp = comparison.find_logsumexp(z)
            pieces.append((*comparison.compare(z.sub_(logsumexp), chunk), logsumexp))
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        if not pieces:
            ctx.save_for_backward(hidden, weight)
            ctx.head, ctx.rows = head, []
            return hidden.new_zeros(0, dtype=dtype)
        value, *kept = (torch.cat(columns) for columns in zip(*pieces, strict=True))
        ctx.save_for_backward(hidden, weight, *kept)
        ctx.head, ctx.comparison, ctx.rows = head, comparison, rows
        return value[:, 0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *kept = ctx.saved_tensors
        head, (of_value,) = ctx.head, grad_outputs
        grad_hidden, grad_weight = torch.zeros_like(hidden), None
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        for chunk in ctx.rows if head.columns else ():
            *of_comparison, logsumexp = (column[chunk] for column in kept)
            z = compute_logits(head, chunk)
            factor = compute_slopes(z, head)
            slopes = ctx.comparison.find_slopes(z - logsumexp, chunk, *of_comparison)
            grad = slopes.mul_(of_value[chunk, None]).mul_(factor).to(weight.dtype)
            grad_hidden[chunk] = grad @ head.unpadded_weight
            if grad_weight is not None:
                grad_weight[: head.columns].addmm_(grad.t().to(dtype), hidden[chunk].to(dtype))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
