"""Log-probabilities of given tokens and entropies, from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary that a rank's logits cover."""

    start: int
    """Vocabulary entry of column 0."""
    columns: int
    """Columns that are real entries; the rest of the rank's columns is padding."""
    group: dist.ProcessGroup | None
    """Ranks that hold the other parts; None: there are no others."""


def vocab_shard(vocab: int, width: int, group: dist.ProcessGroup | None) -> VocabShard:
    """The part of a vocabulary of `vocab` entries that a rank holds when every rank has `width` columns."""
    if group is None or dist.get_world_size(group) == 1:
        return VocabShard(start=0, columns=vocab, group=None)
    start = dist.get_rank(group) * width
    return VocabShard(start=start, columns=max(0, min(width, vocab - start)), group=group)


class _VocabParallelLogprobs(torch.autograd.Function):
    """log softmax(scale * logits)[target], reducing one number per token instead of gathering the vocabulary.

    Forward: log p = z_target - logsumexp(z), z = scale * logits. Backward: d log p / d logits = scale (1[target] - p).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: float, shard: VocabShard, chunk: int) -> Tensor:
        """Logits [tokens, columns of the rank], any float type, and targets [tokens], int64, to [tokens], float32."""
        # A target of another rank reads column 0 here, and is masked: no index may leave the rank's columns.
        local = targets - shard.start
        here = (local >= 0) & (local < shard.columns)
        index = local.clamp(0, max(shard.columns - 1, 0))[:, None]
        logsumexp = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        target_logit = torch.zeros_like(logsumexp)
        # In chunks of tokens, because logits in float32 are the largest tensor of the whole step.
        for rows in _chunks(len(targets), chunk):
            z = logits[rows, : shard.columns].float() * scale
            logsumexp[rows] = torch.logsumexp(z, dim=1)
            if shard.columns:
                target_logit[rows] = torch.where(here[rows], z.gather(1, index[rows])[:, 0], 0.0)
        if shard.group is not None:
            # A clone: the reduction works in place, and this rank's own logsumexp is still needed. Relative to the
            # highest, no exponential overflows; one sum then carries both numbers of each token.
            highest = logsumexp.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=shard.group)
            both = torch.stack([torch.exp(logsumexp - highest), target_logit])
            dist.all_reduce(both, group=shard.group)
            logsumexp, target_logit = both[0].log() + highest, both[1]
        ctx.save_for_backward(logits, logsumexp, here, index)
        ctx.scale, ctx.shard, ctx.chunk = scale, shard, chunk
        return target_logit - logsumexp

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the tokens' log-probabilities, [tokens], float32, to [tokens, columns of the rank] of logits."""
        logits, logsumexp, here, index = ctx.saved_tensors
        columns = ctx.shard.columns
        grad = torch.zeros_like(logits)  # padding columns stay at 0: they take no part
        # The softmax is computed again: kept from the forward pass it would be another tensor the size of the logits.
        for rows in _chunks(len(logsumexp), ctx.chunk):
            coefficient = (grad_outputs[0][rows] * ctx.scale)[:, None]
            piece = torch.exp(logits[rows, :columns].float() * ctx.scale - logsumexp[rows, None]).mul_(-coefficient)
            if columns:
                piece.scatter_add_(1, index[rows], torch.where(here[rows, None], coefficient, 0.0))
            grad[rows, :columns] = piece.to(grad.dtype)
        return grad, None, None, None, None


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def target_logprobs(
    logits: Tensor, targets: Tensor, shard: VocabShard, *, temperature: float = 1.0, chunk_tokens: int | None = None
) -> Tensor:
    """Log-probability of given tokens, each under the logits in its row.

    Args:
        logits: [tokens, columns of this rank], any float type.
        targets: [tokens], int64; all ranks of the shard's group have equal ones.
        shard: which vocabulary entries this rank's columns are; padding columns take no part.
        temperature: logits are divided by it; 0 (greedy sampling) counts as 1.
        chunk_tokens: tokens whose logits are turned to float32 at once; None is all.

    Returns:
        [tokens], float32, differentiable in `logits`.
    """
    chunk = chunk_tokens or max(len(targets), 1)
    logprobs: Tensor = _VocabParallelLogprobs.apply(logits, targets, _scale(temperature), shard, chunk)
    return logprobs


def entropies(
    logits: Tensor, shard: VocabShard, *, temperature: float = 1.0, chunk_tokens: int | None = None
) -> Tensor:
    """Entropy in nats of the distribution in each row of logits.

    Args:
        logits: [tokens, columns of this rank], any float type.
        shard: which vocabulary entries this rank's columns are; padding columns take no part.
        temperature: logits are divided by it; 0 (greedy sampling) counts as 1.
        chunk_tokens: tokens whose logits are turned to float32 at once; None is all.

    Returns:
        [tokens], float32, differentiable in `logits`.
    """
    entropy: Tensor = _VocabParallelEntropy.apply(
        logits, _scale(temperature), shard, chunk_tokens or max(len(logits), 1)
    )
    return entropy


def _scale(temperature: float) -> float:
    return 1.0 / temperature if temperature > 0 else 1.0


def token_logprobs(
    logits: Tensor, token_ids: Tensor, shard: VocabShard, *, temperature: float = 1.0, chunk_tokens: int | None = None
) -> Tensor:
    """Log-probability of every token given the ones before it.

    Args:
        logits: [sequences, length, columns of this rank], any float type; position t predicts token t + 1.
        token_ids: [sequences, length], int64; all ranks of the shard's group have equal ones.
        shard: which vocabulary entries this rank's columns are; padding columns take no part.
        temperature: logits are divided by it; 0 (greedy sampling) counts as 1.
        chunk_tokens: tokens whose logits are turned to float32 at once; None is all.

    Returns:
        [sequences, length], float32, differentiable in `logits`; 0 at position 0, which nothing predicts.
    """
    sequences, length, width = logits.shape
    # Position t predicts token t + 1: targets move left, and the result right. What the roll brings round to the last
    # position, the first token, is cut off again.
    next_tokens = token_ids.roll(-1, dims=1).reshape(-1)
    rows = logits.reshape(sequences * length, width)
    logprobs = target_logprobs(rows, next_tokens, shard, temperature=temperature, chunk_tokens=chunk_tokens)
    return torch.nn.functional.pad(logprobs.view(sequences, length)[:, :-1], (1, 0))


class _VocabParallelEntropy(torch.autograd.Function):
    """Entropy of softmax(scale * logits), reducing three numbers per token instead of gathering the vocabulary.

    Forward: H = logsumexp(z) - sum_j p_j z_j, z = scale * logits. Backward: dH / d logits_j = -scale p_j (log p_j + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scale: float, shard: VocabShard, chunk: int) -> Tensor:
        """Logits, [tokens, columns of the rank], any float type, to entropies, [tokens], float32."""
        tokens = logits.shape[0]
        highest = torch.full((tokens,), -torch.inf, dtype=torch.float32, device=logits.device)
        if shard.columns:
            highest = logits[:, : shard.columns].amax(dim=1).float() * scale
        if shard.group is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=shard.group)
        # Relative to the highest logit of all ranks: sum of exp(d) and of exp(d) * d, with d = z - highest.
        sums = torch.zeros(2, tokens, dtype=torch.float32, device=logits.device)
        for rows in _chunks(tokens, chunk):
            below = logits[rows, : shard.columns].float() * scale - highest[rows, None]
            weights = below.exp()
            sums[0, rows], sums[1, rows] = weights.sum(dim=1), (weights * below).sum(dim=1)
        if shard.group is not None:
            dist.all_reduce(sums, group=shard.group)
        entropy = sums[0].log() - sums[1] / sums[0]
        ctx.save_for_backward(logits, highest + sums[0].log(), entropy)
        ctx.scale, ctx.shard, ctx.chunk = scale, shard, chunk
        return entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the tokens' entropies, [tokens], float32, to [tokens, columns of the rank] of logits."""
        logits, logsumexp, entropy = ctx.saved_tensors
        columns = ctx.shard.columns
        grad = torch.zeros_like(logits)  # padding columns stay at 0: they take no part
        # The softmax is computed again: kept from the forward pass it would be another tensor the size of the logits.
        for rows in _chunks(len(logsumexp), ctx.chunk):
            logp = logits[rows, :columns].float() * ctx.scale - logsumexp[rows, None]
            coefficient = (grad_outputs[0][rows] * -ctx.scale)[:, None]
            grad[rows, :columns] = (logp.exp() * (logp + entropy[rows, None]) * coefficient).to(grad.dtype)
        return grad, None, None, None


def token_entropy(
    logits: Tensor, shard: VocabShard, *, temperature: float = 1.0, chunk_tokens: int | None = None
) -> Tensor:
    """Entropy in nats of the distribution that each token was drawn from.

    Args:
        logits: [sequences, length, columns of this rank], any float type; position t predicts token t + 1.
        shard: which vocabulary entries this rank's columns are; padding columns take no part.
        temperature: logits are divided by it; 0 (greedy sampling) counts as 1.
        chunk_tokens: tokens whose logits are turned to float32 at once; None is all.

    Returns:
        [sequences, length], float32, differentiable in `logits`; position t speaks of token t, and is 0 for the first.
    """
    sequences, length, width = logits.shape
    # The distribution at position t is that of token t + 1: the result moves right, and the last is cut off.
    rows = logits.reshape(sequences * length, width)
    entropy = entropies(rows, shard, temperature=temperature, chunk_tokens=chunk_tokens)
    return torch.nn.functional.pad(entropy.view(sequences, length)[:, :-1], (1, 0))
