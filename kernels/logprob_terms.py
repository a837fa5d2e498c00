"""What every way of computing log-probabilities from hidden states takes and gives, and the arithmetic they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK_NUMBERS = 2**26
"""Logits, or gradients of them, that are held at once when nobody says how many: 256 MiB of float32. With fewer, adding
up a gradient chunk by chunk takes longer than the products."""


@dataclass(frozen=True, slots=True)
class Head:
    """The products that logits come from: z = scale * weight @ hidden, for this rank's part of the vocabulary."""

    hidden: Tensor
    """[tokens, hidden], any float type."""
    weight: Tensor
    """[rows of this rank, hidden], in the dtype of the hidden states."""
    columns: int
    """Rows of the weight that are vocabulary entries; those after them are padding."""
    local: Tensor
    """[tokens], int64: the target's row; outside [0, columns) when another rank has it."""
    scale: float

    @property
    def real(self) -> Tensor:
        """[columns, hidden]: the weight without padding."""
        return self.weight[: self.columns]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the logits of tokens are reduced to over a part of the vocabulary."""

    highest: Tensor
    """[..., tokens], float32: the highest logit, m; -inf over no entries."""
    sums: Tensor
    """[3, ..., tokens], float32: sum_j exp(z_j - m), sum_j exp(z_j - m) (z_j - m), and the target's logit or 0."""

    def relative_to(self, top: Tensor) -> Tensor:
        """The sums as they are with `top`, [..., tokens], float32, at least the highest logit, in the place of m.

        With d = m - top: exp(z - top) = exp(z - m) exp(d), and z - top = z - m + d. Sums of parts of the vocabulary can
        then be added up.
        """
        there = self.highest.isfinite()
        shift = torch.where(there, self.highest - top, 0.0)
        factor = torch.where(there, shift.exp(), 0.0)  # 0 of a part that is all padding
        exponentials, weighted, target = self.sums
        return torch.stack([exponentials * factor, (weighted + exponentials * shift) * factor, target])


@dataclass(frozen=True, slots=True)
class Asked:
    """What the gradients of a head are asked for: the distribution that its logits made, and gradients of results."""

    logsumexp: Tensor
    """[tokens], float32, over all ranks' parts of the vocabulary."""
    entropy: Tensor
    """[tokens], float32, in nats."""
    of_logprobs: Tensor
    """[tokens], float32."""
    of_entropy: Tensor | None
    """[tokens], float32; None: the entropy is in no loss."""
    of_weight: bool
    """Whether the weight is trained. Frozen, as beside adapters, the largest matrix of a model gets no gradient."""


class LogprobKernel(Protocol):
    """A way through the head that never holds [tokens, columns]. Heads have a token and a column at least."""

    def statistics(self, head: Head) -> Statistics:
        """Of this rank's part of the vocabulary: highest [tokens] and sums [3, tokens], both float32."""
        ...

    def gradients(self, head: Head, asked: Asked) -> tuple[Tensor, Tensor | None]:
        """Those of hidden states and weight, in their shapes and dtypes; padding gets zeros, a frozen weight None.

        d log p / dz_j = 1[target] - p_j and dH / dz_j = -p_j (log p_j + H); dz / dhidden = scale * weight.
        """
        ...
