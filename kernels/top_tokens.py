"""The likeliest tokens of a head whose vocabulary ranks share, without holding all logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo_kernels.head import CHUNK_NUMBERS, Head
from megatron_grpo_kernels.logprob import compute_logits, split_tokens


@torch.no_grad()
def find_top_tokens(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    start: int = 0,
    columns: int | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the k likeliest tokens of softmax(scale * weight @ hidden), the likeliest first.

    Arguments are those of `linear_logprobs`; the vocabulary has at least k entries, and every rank as many rows.

    Returns token ids, [tokens, k], int64; their log-probabilities, [tokens, k], float32; and the logarithm of the
    probability of all other tokens, [tokens], float32, at least that of the smallest float32 number.
    """
    columns = weight.shape[0] if columns is None else columns
    head = Head(hidden, weight, columns, hidden.new_zeros(len(hidden), dtype=torch.int64), scale, cap)
    chunk_tokens = chunk_tokens or max(1, CHUNK_NUMBERS // 2 // weight.shape[0])
    empty = hidden.new_zeros(0, k)
    pieces = [(empty.long(), empty.float(), empty.float().sum(dim=1))]
    for rows in split_tokens(len(hidden), columns, chunk_tokens):
        z = compute_logits(head, rows)
        values, ids = _gather_highest(z, min(k, weight.shape[0]), start, group)
        values, order = values.topk(k, dim=1)
        ids = ids.gather(1, order)
        weights = (z - values[:, :1]).exp_()  # the first is the highest of all ranks
        is_local = (ids >= start) & (ids < start + columns)
        others = weights
        if columns:
            chosen = torch.zeros_like(z).scatter_add_(1, torch.where(is_local, ids - start, 0), is_local.to(z.dtype))
            others = weights * (chosen == 0)
        sums = torch.stack([weights.sum(dim=1), others.sum(dim=1)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, rest = sums
        logprobs = values - (values[:, :1] + total[:, None].log())
        pieces.append((ids, logprobs.float(), (rest / total).clamp(min=torch.finfo(torch.float32).tiny).log().float()))
    ids, logprobs, tail = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return ids, logprobs, tail


def _gather_highest(z: Tensor, k: int, start: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Gather the k highest logits of each rank and their entries: both [tokens, ranks * k]."""
    padded = torch.nn.functional.pad(z, (0, max(0, k - z.shape[1])), value=-torch.inf)
    values, ids = padded.topk(k, dim=1)
    ids = ids + start
    if group is None:
        return values, ids
    gathered = []
    for tensor in (values.contiguous(), ids.contiguous()):
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor, group=group)
        gathered.append(torch.cat(parts, dim=1))
    return gathered[0], gathered[1]
