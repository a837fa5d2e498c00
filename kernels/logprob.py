"""Log-probabilities and entropies from hidden states, never holding all logits: autograd function, and torch kernel."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo_kernels.head import CHUNK_NUMBERS, BackwardInput, Head, HeadKernel, Statistics

EXCLUDED = -1e30
"""Logit of an excluded entry. Its probability is 0, and its product with 0 is 0; that of -inf would be NaN."""


@dataclass(frozen=True, slots=True)
class ChunkedLogprobs:
    """The torch kernel, chunk by chunk; backward computes logits again (a third more arithmetic)."""

    chunk_tokens: int | None  # tokens of a chunk; None: the number of tokens with `CHUNK_NUMBERS` logits

    def compute_statistics(self, head: Head) -> Statistics:
        tokens = len(head.local)
        is_local, index = _locate_targets(head)
        highest = torch.empty(tokens, dtype=torch.float32, device=head.hidden.device)
        sums = torch.empty(3, tokens, dtype=torch.float32, device=head.hidden.device)
        for rows in split_tokens(tokens, head.columns, self.chunk_tokens):
            z = compute_logits(head, rows)
            highest[rows] = z.amax(dim=1)
            sums[2, rows] = torch.where(is_local[rows], z.gather(1, index[rows])[:, 0], 0.0)
            below = z.sub_(highest[rows, None])  # relative to the highest logit no exponential overflows
            weights = below.exp()
            sums[0, rows] = weights.sum(dim=1)
            sums[1, rows] = torch.linalg.vecdot(weights, below)
        return Statistics(highest, sums)

    def compute_gradients(self, head: Head, inputs: BackwardInput) -> tuple[Tensor, Tensor | None]:
        """Compute gradients of hidden states and weight (`HeadKernel`).

        d log p / dz_j = 1[target] - p_j and dH / dz_j = -p_j (log p_j + H); dz / dhidden = slope * weight.
        """
        is_local, index = _locate_targets(head)
        grad_hidden = torch.empty_like(head.hidden)
        grad_weight = None
        if inputs.of_weight:
            grad_weight = torch.zeros(head.weight.shape, dtype=torch.float32, device=head.weight.device)
        for rows in split_tokens(len(head.local), head.columns, self.chunk_tokens):
            z = compute_logits(head, rows)
            slopes = compute_slopes(z, head)
            logp = z.sub_(inputs.logsumexp[rows, None])
            coefficient = inputs.of_logprobs[rows, None]
            # In place: a chunk's logits take as much memory as all activations of its tokens.
            if inputs.of_entropy is None:
                grad = logp.exp_().mul_(-coefficient)
            else:
                by_entropy = (logp + inputs.entropy[rows, None]).mul_(-inputs.of_entropy[rows, None])
                grad = logp.exp_().mul_(by_entropy.sub_(coefficient))
            grad.scatter_add_(1, index[rows], torch.where(is_local[rows, None], coefficient, 0.0))
            grad = grad.mul_(slopes).to(head.weight.dtype)
            grad_hidden[rows] = grad @ head.unpadded_weight
            if grad_weight is not None:
                grad_weight[: head.columns].addmm_(grad.t().float(), head.hidden[rows].float())
        return grad_hidden, None if grad_weight is None else grad_weight.to(head.weight.dtype)


def split_tokens(tokens: int, columns: int, chunk_tokens: int | None) -> list[slice]:
    size = chunk_tokens or max(1, CHUNK_NUMBERS // columns)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _locate_targets(head: Head) -> tuple[Tensor, Tensor]:
    """Find (is the target on this rank, [tokens]; its column or 0, [tokens, 1])."""
    is_local = (head.local >= 0) & (head.local < head.columns)
    return is_local, torch.where(is_local, head.local, 0)[:, None]


def compute_logits(head: Head, rows: slice) -> Tensor:
    """Compute the logits of some tokens: [tokens, columns], float32 at least."""
    z = head.hidden[rows] @ head.unpadded_weight.t()
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    if head.cap is not None:
        z.div_(head.cap).tanh_().mul_(head.cap)
    z.mul_(head.scale)
    if head.excluded:
        z[:, list(head.excluded)] = EXCLUDED
    return z


def compute_slopes(z: Tensor, head: Head) -> Tensor | float:
    """Compute the derivatives of logits, [tokens, columns], by weight @ hidden."""
    if head.cap is None:
        return head.scale
    return (z / (head.scale * head.cap)).square_().neg_().add_(1.0).mul_(head.scale)  # tanh' = 1 - tanh^2


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    start: int = 0,
    columns: int | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    kernel: Literal["fused", "chunked", "auto"] | HeadKernel = "auto",
    chunk_tokens: int | None = None,
    excluded: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Log-probability of a target and entropy of softmax(scale * weight @ hidden).

    With z = scale * weight @ hidden, or with a cap z = scale * cap * tanh(weight @ hidden / cap):
    log p = z_target - logsumexp(z); H = logsumexp(z) - sum_j p_j z_j, in nats.

    Args:
        hidden: [tokens, hidden], any float type, equal on all ranks of the group.
        weight: [rows of this rank, hidden], in the dtype of the hidden states: a row for each vocabulary entry.
        targets: [tokens], int64, equal on all ranks of the group.
        start: vocabulary entry of this rank's first row.
        columns: number of rows that are real entries; the rows after them are padding, which is ignored; None: all.
        group: ranks that together hold the vocabulary; None: this rank holds all of it.
        scale: factor of the logits, one over the temperature.
        cap: bound of the logits before they are scaled; None: they have none.
        kernel: "fused" in Triton, "chunked" in torch, "auto": fused for tensors on CUDA where Triton is installed;
            or the kernel itself.
        chunk_tokens: tokens whose logits the chunked kernel holds at once; None: the number with 2**26 logits.
        excluded: vocabulary entries that are never drawn: the distribution is over the others. No target is one of
            them, the logits have no cap, and "auto" is the chunked kernel.

    Returns log-probabilities and entropies, both [tokens], float32. Gradients flow to the hidden states and the weight;
    that of the hidden states is this rank's part, which adds up over the group. Raises ValueError if `kernel` is
    "fused", and the fused kernel cannot run on these tensors.
    """
    columns = weight.shape[0] if columns is None else columns
    if excluded:
        assert cap is None, "the slope of a capped logit would overflow"
        kernel = "chunked" if kernel == "auto" else kernel
    kernel = _choose_kernel(kernel, hidden, chunk_tokens) if isinstance(kernel, str) else kernel
    rows = tuple(entry - start for entry in excluded if 0 <= entry - start < columns)
    result: tuple[Tensor, Tensor] = _LinearLogprobs.apply(
        hidden, weight, targets - start, columns, group, scale, cap, kernel, rows
    )
    return result


def _choose_kernel(name: str, hidden: Tensor, chunk_tokens: int | None) -> HeadKernel:
    if name == "auto":
        name = "fused" if hidden.is_cuda and importlib.util.find_spec("triton") is not None else "chunked"
    if name == "chunked":
        return ChunkedLogprobs(chunk_tokens)
    # Imported here: Triton decides at its import whether kernels are compiled or interpreted, and may not be installed.
    from megatron_grpo_kernels.fused_logprob import FusedLogprobs

    return FusedLogprobs()


class _LinearLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies from hidden states, with gradients (`linear_logprobs`)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        local: Tensor,
        columns: int,
        group: dist.ProcessGroup | None,
        scale: float,
        cap: float | None,
        kernel: HeadKernel,
        excluded: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies; `local` is each target's row, [tokens], int64."""
        head = Head(hidden, weight, columns, local, scale, cap, excluded)
        if len(local) and columns:
            statistics = kernel.compute_statistics(head)
        else:  # no tokens, or a vocabulary that is all padding
            empty = torch.zeros(3, len(local), dtype=torch.float32, device=local.device)
            statistics = Statistics(torch.full_like(empty[0], -torch.inf), empty)
        highest, sums = statistics.highest, statistics.sums
        if group is not None:
            highest = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            sums = statistics.rebase_sums(highest)
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        logsumexp, entropy = highest + log_sum, log_sum - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, local, logsumexp, entropy)
        ctx.columns, ctx.scale, ctx.cap, ctx.kernel, ctx.excluded = columns, scale, cap, kernel, excluded
        ctx.set_materialize_grads(False)  # few losses contain the entropy
        return sums[2] - logsumexp, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, logsumexp, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = grad_outputs
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(logsumexp)
        if len(local) and ctx.columns:
            head = Head(hidden, weight, ctx.columns, local, ctx.scale, ctx.cap, ctx.excluded)
            inputs = BackwardInput(logsumexp, entropy, of_logprobs, of_entropy, of_weight=ctx.needs_input_grad[1])
            both = ctx.kernel.compute_gradients(head, inputs)
        else:
            both = torch.zeros_like(hidden), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        return *both, None, None, None, None, None, None, None
