"""The head of a language model as its kernels see it: operands, statistics of logits, input of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Default number of logits, or of their gradients, in memory at once: 256 MiB of float32. With fewer, the sums of
# gradients over chunks take longer than the products.
CHUNK_NUMBERS = 2**26


@dataclass(frozen=True, slots=True)
class Head:
    """Operands of this rank's logits: z = scale * weight @ hidden.

    With a cap, z = scale * cap * tanh(weight @ hidden / cap).
    """

    hidden: Tensor  # [tokens, hidden], any float type
    weight: Tensor  # [rows of this rank, hidden], in the dtype of the hidden states
    columns: int  # number of rows of the weight that are vocabulary entries; the rows after them are padding
    local: Tensor  # [tokens], int64: row of each target; outside [0, columns) when another rank has it
    scale: float
    cap: float | None = None  # bound of the logits before they are scaled; None: they have none
    excluded: tuple[int, ...] = ()  # rows of entries that are never drawn; the chunked kernel alone leaves them out

    @property
    def unpadded_weight(self) -> Tensor:
        """[columns, hidden]: the weight without padding."""
        return self.weight[: self.columns]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sums over a part of the vocabulary, from which log-probabilities and entropies follow."""

    highest: Tensor  # [..., tokens], float32: the highest logit, m; -inf over no entries
    sums: Tensor
    """[3, ..., tokens], float32: sum_j exp(z_j - m), sum_j exp(z_j - m) (z_j - m), and the target's logit or 0."""

    def rebase_sums(self, top: Tensor) -> Tensor:
        """Compute the sums with `top`, [..., tokens], in place of m.

        `top` is at least m. With d = m - top: exp(z - top) = exp(z - m) exp(d), and z - top = z - m + d. Sums of parts
        of the vocabulary can then be added up.
        """
        has_entries = self.highest.isfinite()
        shift = torch.where(has_entries, self.highest - top, 0.0)
        factor = torch.where(has_entries, shift.exp(), 0.0)  # 0 for a part that is all padding
        exponentials, weighted, target = self.sums
        return torch.stack([exponentials * factor, (weighted + exponentials * shift) * factor, target])


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Input of a head's backward pass: the logits' distribution and output gradients."""

    logsumexp: Tensor  # [tokens], float32: log of the sum of exp(logit) over all ranks' parts of the vocabulary
    entropy: Tensor  # [tokens], float32: entropy in nats
    of_logprobs: Tensor  # [tokens], float32: gradient of the loss by each log-probability
    of_entropy: Tensor | None
    """[tokens], float32: gradient of the loss by each entropy; None: the loss does not contain the entropy."""
    of_weight: bool  # whether the weight needs a gradient; with adapters it is frozen


class HeadKernel(Protocol):
    """Arithmetic of a head with at least one token and one column."""

    def compute_statistics(self, head: Head) -> Statistics:
        """Compute statistics of this rank's vocabulary: highest [tokens], sums [3, tokens]."""

    def compute_gradients(self, head: Head, inputs: BackwardInput) -> tuple[Tensor, Tensor | None]:
        """Compute gradients of hidden states and weight, in their shapes and dtypes.

        Padding gets zeros, a frozen weight None.
        """
