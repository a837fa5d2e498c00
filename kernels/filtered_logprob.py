"""Log-probabilities under a distribution that top-k, top-p or min-p has cut off, chunk by chunk in torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo_kernels.head import Head
from megatron_grpo_kernels.kept_tokens import Vocabulary, find_kept_bounds, mask_removed_
from megatron_grpo_kernels.logprob import _locate_targets, compute_logits, compute_slopes, split_tokens
from megatron_grpo_kernels.token_filter import TokenFilter


class FilteredLogprobs(NamedTuple):
    """What `filtered_logprobs` computes, each [tokens], float32, with gradient."""

    logprobs: Tensor
    """Log-probability of the target under softmax over the kept tokens; -inf where the filter removes the target."""
    entropy: Tensor  # entropy of that distribution, in nats
    unfiltered: Tensor  # log-probability of the target under softmax over the whole vocabulary


def filtered_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_filter: TokenFilter,
    *,
    start: int = 0,
    columns: int | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    chunk_tokens: int | None = None,
) -> FilteredLogprobs:
    """Log-probability of a target over the tokens that a filter keeps.

    The distribution is softmax(scale * weight @ hidden) over these tokens. The kept tokens are constants: the gradient
    is that of a softmax over a fixed set, and 0 for a removed target. Backward computes each chunk's logits again.

    Args:
        hidden: [tokens, hidden], any float type, equal on all ranks of the group.
        weight: [rows of this rank, hidden], in the dtype of the hidden states, with as many rows on every rank.
        targets: [tokens], int64, equal on all ranks of the group.
        token_filter: which tokens are kept, from the scaled logits.
        start: vocabulary entry of this rank's first row.
        columns: number of rows that are real entries; the rows after them are padding, which is ignored; None: all.
        group: ranks that together hold the vocabulary; None: this rank holds all of it.
        scale: factor of the logits, one over the temperature.
        cap: bound of the logits before they are scaled, as in `linear_logprobs`; None: they have none.
        chunk_tokens: tokens whose logits are held at once; None: the number with 2**26 logits.

    Gradients flow to the hidden states and the weight; the former are this rank's part, which adds up over the group.
    """
    columns = weight.shape[0] if columns is None else columns
    vocabulary = Vocabulary(start, weight.shape[0], group)
    result: tuple[Tensor, Tensor, Tensor] = _FilteredLogprobs.apply(
        hidden, weight, targets, token_filter, vocabulary, columns, scale, cap, chunk_tokens
    )
    return FilteredLogprobs(*result)


class _FilteredLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies over kept tokens, with gradients (`filtered_logprobs`)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        token_filter: TokenFilter,
        vocabulary: Vocabulary,
        columns: int,
        scale: float,
        cap: float | None,
        chunk_tokens: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, start = len(targets), vocabulary.start
        head = Head(hidden, weight, columns, targets - start, scale, cap)
        is_local, index = _locate_targets(head)
        # Over kept tokens: sums of e = exp(z - top) and of e (z - top); over all: of e; and the target's logit.
        sums = torch.zeros(4, tokens, dtype=torch.float32, device=hidden.device)
        top, cut, share = torch.empty(3, tokens, dtype=torch.float32, device=hidden.device)
        # Equal on all ranks, which go through the same collectives.
        chunks = split_tokens(tokens, vocabulary.rows, chunk_tokens)
        for rows in chunks:
            z = compute_logits(head, rows)
            top[rows], cut[rows], share[rows] = find_kept_bounds(z, token_filter, vocabulary)
            if columns:
                sums[3, rows] = torch.where(is_local[rows], z.gather(1, index[rows])[:, 0], 0.0)
            below = z - top[rows, None]
            weights = below.exp()
            sums[2, rows] = weights.sum(dim=1)
            mask_removed_(weights, z, cut[rows], share[rows])
            sums[0, rows] = weights.sum(dim=1)
            sums[1, rows] = torch.linalg.vecdot(weights, below)
        vocabulary.reduce(sums)
        log_sum, of_target = sums[0].log(), sums[3]
        logsumexp, logsumexp_of_all, entropy = top + log_sum, top + sums[2].log(), log_sum - sums[1] / sums[0]
        # A NaN among the logits makes the sum NaN, which must not pass for a token that the filter removes.
        outside = (of_target < cut) & ~logsumexp.isnan()
        ctx.save_for_backward(hidden, weight, targets, cut, share, logsumexp, logsumexp_of_all, entropy, outside)
        ctx.of_head = start, columns, scale, cap, chunks
        ctx.set_materialize_grads(False)
        return (of_target - logsumexp).masked_fill(outside, -torch.inf), entropy, of_target - logsumexp_of_all

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of hidden states and weight.

        Over the kept tokens d log p / dz_j = 1[target] - p_j and dH / dz_j = -p_j (log p_j + H), and 0 elsewhere; over
        the whole vocabulary d log q / dz_j = 1[target] - q_j; dz / dhidden = slope * weight.
        """
        hidden, weight, targets, cut, share, logsumexp, logsumexp_of_all, entropy, outside = ctx.saved_tensors
        start, columns, scale, cap, chunks = ctx.of_head
        head = Head(hidden, weight, columns, targets - start, scale, cap)
        is_local, index = _locate_targets(head)
        of_logprobs, of_entropy, of_unfiltered = (
            torch.zeros_like(cut) if gradient is None else gradient for gradient in grad_outputs
        )
        of_logprobs = of_logprobs.masked_fill(outside, 0.0)
        of_target = of_logprobs + of_unfiltered
        grad_hidden, grad_weight = torch.zeros_like(hidden), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in chunks if columns else ():
            z = compute_logits(head, rows)
            slopes, logp = compute_slopes(z, head), z - logsumexp[rows, None]
            factor = -of_logprobs[rows, None]
            if grad_outputs[1] is not None:
                factor = factor - of_entropy[rows, None] * (logp + entropy[rows, None])
            grad = mask_removed_(logp.exp_().mul_(factor), z, cut[rows], share[rows])
            if grad_outputs[2] is not None:
                grad -= z.sub_(logsumexp_of_all[rows, None]).exp_().mul_(of_unfiltered[rows, None])
            grad.scatter_add_(1, index[rows], torch.where(is_local[rows, None], of_target[rows, None], 0.0))
            rounded = grad.mul_(slopes).to(weight.dtype)
            grad_hidden[rows] = rounded @ head.unpadded_weight
            if grad_weight is not None:
                grad_weight[:columns].addmm_(rounded.t().float(), hidden[rows].float())
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, of_weight, None, None, None, None, None, None, None
