"""From hidden states to log-probabilities and entropies, without ever holding the logits of all tokens.

The vocabulary may be split over ranks. Logits are made for some tokens at a time, in the forward pass and again in the
backward pass: memory is that of one chunk, for a third more arithmetic than keeping [tokens, vocabulary].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_NUMBERS = 2**26
"""Logits that are held at once when nobody says how many tokens: 256 MiB of float32. With fewer, adding up the weight's
gradient chunk by chunk takes longer than the products."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    start: int = 0,
    columns: int | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of a target under softmax(scale * weight @ hidden), and the entropy of that distribution.

    With z = scale * weight @ hidden: log p = z_target - logsumexp(z); H = logsumexp(z) - sum_j p_j z_j, in nats.

    Args:
        hidden: [tokens, hidden], any float type, equal on all ranks of the group.
        weight: [rows of this rank, hidden], in the dtype of the hidden states: a row for each vocabulary entry.
        targets: [tokens], int64, equal on all ranks of the group.
        start: vocabulary entry of this rank's first row.
        columns: rows that are real entries, the others being padding that takes no part; None: all.
        group: ranks that hold the other parts of the vocabulary; None: there are none.
        scale: factor of the logits, one over the temperature.
        chunk_tokens: tokens whose logits are held at once; None: as many as make `CHUNK_NUMBERS` logits.

    Returns:
        Log-probabilities and entropies, both [tokens], float32. Gradients flow to the hidden states and the weight;
        that of the hidden states is this rank's part, which adds up over the group.
    """
    real = weight.shape[0] if columns is None else columns
    chunk = chunk_tokens or max(1, CHUNK_NUMBERS // max(real, 1))
    both: tuple[Tensor, Tensor] = _LinearLogprobs.apply(hidden, weight, targets, start, real, group, scale, chunk)
    return both


class _LinearLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies from hidden states, with gradients, chunk by chunk (`linear_logprobs`)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        start: int,
        columns: int,
        group: dist.ProcessGroup | None,
        scale: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] and [rows, hidden], any float type, with targets [tokens], int64, to [tokens], float32."""
        tokens = len(targets)
        local = targets - start
        # A target of another rank reads column 0 here, and is masked: no index may leave the rank's columns.
        here = (local >= 0) & (local < columns)
        index = local.clamp(0, max(columns - 1, 0))[:, None]
        highest = torch.full((tokens,), -torch.inf, dtype=torch.float32, device=hidden.device)
        sums = torch.zeros(3, tokens, dtype=torch.float32, device=hidden.device)
        for rows in _chunks(tokens, chunk if columns else 0):
            z = _logits(hidden[rows], weight[:columns], scale)
            highest[rows] = z.amax(dim=1)
            sums[2, rows] = torch.where(here[rows], z.gather(1, index[rows])[:, 0], 0.0)
            below = z.sub_(highest[rows, None])  # relative to the highest logit no exponential overflows
            weights = below.exp()
            sums[0, rows] = weights.sum(dim=1)
            sums[1, rows] = torch.linalg.vecdot(weights, below)
        if group is not None:
            top = highest.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            shift = torch.where(highest.isfinite(), highest - top, torch.zeros_like(top))  # none of a rank of padding
            factor = torch.where(highest.isfinite(), shift.exp(), torch.zeros_like(top))
            sums[1] = (sums[1] + sums[0] * shift) * factor
            sums[0] *= factor
            dist.all_reduce(sums, group=group)
            highest = top
        log_sum = sums[0].log()
        logsumexp, entropy = highest + log_sum, log_sum - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, logsumexp, entropy, here, index)
        ctx.columns, ctx.scale, ctx.chunk = columns, scale, chunk
        ctx.set_materialize_grads(False)  # few losses ask for the entropy's
        return sums[2] - logsumexp, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of log-probabilities and entropies, [tokens], float32, to those of hidden states and weight.

        d log p / dz_j = 1[target] - p_j and dH / dz_j = -p_j (log p_j + H); dz / dhidden = scale * weight.
        """
        hidden, weight, logsumexp, entropy, here, index = ctx.saved_tensors
        of_logprobs, of_entropy = grad_outputs
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(logsumexp)
        real = weight[: ctx.columns]
        grad_hidden = torch.zeros_like(hidden)
        frozen = not ctx.needs_input_grad[1]  # as beside adapters: the largest matrix of a model gets no gradient
        grad_weight = None if frozen else torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _chunks(len(logsumexp), ctx.chunk if ctx.columns else 0):
            logp = _logits(hidden[rows], real, ctx.scale).sub_(logsumexp[rows, None])
            coefficient = of_logprobs[rows, None]
            # In place: each tensor of a chunk is as large as all that the layers hold for its tokens.
            if of_entropy is None:
                grad = logp.exp_().mul_(-coefficient)
            else:
                factor = (logp + entropy[rows, None]).mul_(-of_entropy[rows, None]).sub_(coefficient)
                grad = logp.exp_().mul_(factor)
            grad.scatter_add_(1, index[rows], torch.where(here[rows, None], coefficient, 0.0))
            grad = grad.mul_(ctx.scale).to(weight.dtype)
            grad_hidden[rows] = grad @ real
            if grad_weight is not None:
                grad_weight[: ctx.columns].addmm_(grad.t().float(), hidden[rows].float())
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, of_weight, None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, scale: float) -> Tensor:
    """[tokens, hidden] and [columns, hidden], any float type, to [tokens, columns], float32."""
    return (hidden @ weight.t()).float().mul_(scale)


def _chunks(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size`; none at all of a size of 0."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size)) if size else iter(())
