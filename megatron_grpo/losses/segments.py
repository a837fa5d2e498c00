"""Which sequence each token of a flat microbatch belongs to, and sums over whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """The sequences that the tokens of a flat microbatch, [tokens], belong to.

    Context-parallel ranks each hold some tokens of every sequence. What speaks of a whole sequence is added up over
    them; it has no gradient, so that nothing has to flow back.
    """

    of_token: Tensor
    """[tokens], int64: number of the token's sequence in the microbatch."""
    sizes: Tensor
    """[sequences], float32: tokens in the loss of each whole sequence, on all ranks that share it."""
    join: Callable[[Tensor], Tensor] | None = None
    """[sequences] of this rank's part -> [sequences] of all parts; None: this rank has whole sequences."""

    @torch.no_grad()
    def totals(self, values: Tensor) -> Tensor:
        """[tokens], float32, 0 outside the loss -> [tokens], without gradient: sum over each token's whole sequence."""
        sums = torch.zeros_like(self.sizes, dtype=values.dtype).index_add_(0, self.of_token, values)
        return (sums if self.join is None else self.join(sums))[self.of_token]

    @property
    def size_of_token(self) -> Tensor:
        """[tokens], float32: tokens in the loss of each token's sequence, at least 1."""
        return self.sizes.clamp(min=1)[self.of_token]
