"""From hidden states to log-probabilities and entropies, without ever holding the logits of all tokens.

The vocabulary may be split over ranks. How the logits of a rank are gone through is a matter of the kernel:
`chunked_logprob` in torch, `fused_logprob` in Triton; both make them again in the backward pass.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo_kernels.chunked_logprob import ChunkedLogprobs
from megatron_grpo_kernels.logprob_terms import Asked, Head, LogprobKernel, Statistics


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    start: int = 0,
    columns: int | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float = 1.0,
    kernel: Literal["fused", "chunked", "auto"] = "auto",
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
        kernel: "fused" in Triton, "chunked" in torch, "auto": fused for tensors on CUDA where Triton is installed.
        chunk_tokens: tokens whose logits the chunked kernel holds at once; None: as many as make 2**26 logits.

    Returns:
        Log-probabilities and entropies, both [tokens], float32. Gradients flow to the hidden states and the weight;
        that of the hidden states is this rank's part, which adds up over the group.

    Raises:
        ValueError: the fused kernel is asked for and cannot run on these tensors.
    """
    real = weight.shape[0] if columns is None else columns
    way = _kernel(kernel, hidden, chunk_tokens)
    both: tuple[Tensor, Tensor] = _LinearLogprobs.apply(hidden, weight, targets - start, real, group, scale, way)
    return both


def _kernel(name: str, hidden: Tensor, chunk_tokens: int | None) -> LogprobKernel:
    """The kernel of this name for hidden states [tokens, hidden], any float type."""
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
        kernel: LogprobKernel,
    ) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] and [rows, hidden], any float type, with rows [tokens], int64, to [tokens], float32."""
        head = Head(hidden, weight, columns, local, scale)
        found = kernel.statistics(head) if len(local) and columns else _of_nothing(local)
        highest, sums = found.highest, found.sums
        if group is not None:
            highest = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            sums = found.relative_to(highest)
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        logsumexp, entropy = highest + log_sum, log_sum - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, local, logsumexp, entropy)
        ctx.columns, ctx.scale, ctx.kernel = columns, scale, kernel
        ctx.set_materialize_grads(False)  # few losses ask for the entropy's
        return sums[2] - logsumexp, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of log-probabilities and entropies, [tokens], float32, to those of hidden states and weight."""
        hidden, weight, local, logsumexp, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = grad_outputs
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(logsumexp)
        if len(local) and ctx.columns:
            head = Head(hidden, weight, ctx.columns, local, ctx.scale)
            asked = Asked(logsumexp, entropy, of_logprobs, of_entropy, of_weight=ctx.needs_input_grad[1])
            both = ctx.kernel.gradients(head, asked)
        else:
            both = torch.zeros_like(hidden), torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        return *both, None, None, None, None, None


def _of_nothing(local: Tensor) -> Statistics:
    """Those of tokens, [tokens], over no vocabulary entries: this rank has nothing but padding."""
    empty = torch.zeros(3, len(local), dtype=torch.float32, device=local.device)
    return Statistics(torch.full_like(empty[0], -torch.inf), empty)
