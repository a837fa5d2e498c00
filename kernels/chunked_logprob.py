"""Log-probabilities from hidden states in torch: logits of some tokens at a time, made again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_grpo_kernels.logprob_terms import CHUNK_NUMBERS, Asked, Head, Statistics


@dataclass(frozen=True, slots=True)
class ChunkedLogprobs:
    """Memory is that of one chunk, for a third more arithmetic than keeping [tokens, columns]."""

    chunk_tokens: int | None
    """Tokens whose logits are held at once; None: as many as make `CHUNK_NUMBERS` logits."""

    def statistics(self, head: Head) -> Statistics:
        """Of this rank's part of the vocabulary: highest [tokens] and sums [3, tokens], both float32."""
        tokens = len(head.local)
        here, index = _targets(head)
        highest = torch.empty(tokens, dtype=torch.float32, device=head.hidden.device)
        sums = torch.empty(3, tokens, dtype=torch.float32, device=head.hidden.device)
        for rows in self._chunks(head):
            z = _logits(head.hidden[rows], head.real, head.scale)
            highest[rows] = z.amax(dim=1)
            sums[2, rows] = torch.where(here[rows], z.gather(1, index[rows])[:, 0], 0.0)
            below = z.sub_(highest[rows, None])  # relative to the highest logit no exponential overflows
            weights = below.exp()
            sums[0, rows] = weights.sum(dim=1)
            sums[1, rows] = torch.linalg.vecdot(weights, below)
        return Statistics(highest, sums)

    def gradients(self, head: Head, asked: Asked) -> tuple[Tensor, Tensor | None]:
        """Those of hidden states and weight, in their shapes and dtypes; padding gets zeros, a frozen weight None."""
        here, index = _targets(head)
        grad_hidden = torch.empty_like(head.hidden)
        grad_weight = None
        if asked.of_weight:
            grad_weight = torch.zeros(head.weight.shape, dtype=torch.float32, device=head.weight.device)
        for rows in self._chunks(head):
            logp = _logits(head.hidden[rows], head.real, head.scale).sub_(asked.logsumexp[rows, None])
            coefficient = asked.of_logprobs[rows, None]
            # In place: each tensor of a chunk is as large as all that the layers hold for its tokens.
            if asked.of_entropy is None:
                grad = logp.exp_().mul_(-coefficient)
            else:
                by_entropy = (logp + asked.entropy[rows, None]).mul_(-asked.of_entropy[rows, None])
                grad = logp.exp_().mul_(by_entropy.sub_(coefficient))
            grad.scatter_add_(1, index[rows], torch.where(here[rows, None], coefficient, 0.0))
            grad = grad.mul_(head.scale).to(head.weight.dtype)
            grad_hidden[rows] = grad @ head.real
            if grad_weight is not None:
                grad_weight[: head.columns].addmm_(grad.t().float(), head.hidden[rows].float())
        return grad_hidden, None if grad_weight is None else grad_weight.to(head.weight.dtype)

    def _chunks(self, head: Head) -> Iterator[slice]:
        """The tokens of a head in turn, as slices."""
        tokens, size = len(head.local), self.chunk_tokens or max(1, CHUNK_NUMBERS // head.columns)
        return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _targets(head: Head) -> tuple[Tensor, Tensor]:
    """Whether the target is this rank's, [tokens], bool; and its column, [tokens, 1], int64, 0 for another rank's."""
    here = (head.local >= 0) & (head.local < head.columns)
    return here, torch.where(here, head.local, 0)[:, None]


def _logits(hidden: Tensor, weight: Tensor, scale: float) -> Tensor:
    """[tokens, hidden] and [columns, hidden], any float type, to [tokens, columns], float32."""
    return (hidden @ weight.t()).float().mul_(scale)
