"""The batch of a step as the driver holds it: lengths and flags of sequences, references to their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Shard:
    """Some sequences of a step, whose tokens lie together in the object store; every replica has whole shards."""

    sequences: NDArray[np.int64]
    """[sequences], int64: numbers in the step of the shard's sequences, ascending."""
    fields: dict[str, Any]
    """Ray's reference to one array, [tokens of the shard], by name of the entry (`STORED_DTYPES`)."""


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """The sequences that a step trains on: numbers by sequence, and references to their tokens.

    Lives on the driver, which never holds a token. The stages of a step extend it; the handle of a model divides it
    among replicas, and a rollout worker reads it for computations over all tokens and for the file of rollouts. The
    samples of a prompt are neighbours.
    """

    lengths: NDArray[np.int64]
    """[sequences], int64: tokens of each, prompt included."""
    response_tokens: NDArray[np.int64]
    """[sequences], int64: sampled tokens of each."""
    in_loss: NDArray[np.bool_]
    """[sequences], bool: whether the loss is taken over the sampled tokens."""
    positive: NDArray[np.bool_] | None = None
    """[sequences], bool: whether the response is correct; None: the loss does not use it."""
    advantages: NDArray[np.float32] | None = None
    """[sequences], float32: advantage of all sampled tokens of a response; None: it differs by token, in the shards."""
    shards: list[Shard] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def loss_tokens(self) -> int:
        """Tokens that the loss is taken over."""
        return int(self.response_tokens[self.in_loss].sum())

    def minibatches(self, samples: int) -> Iterator[NDArray[np.int64]]:
        """[sequences], int64, of one optimizer step after the other: numbers of its sequences, neighbours together."""
        for start in range(0, len(self), samples):
            yield np.arange(start, min(start + samples, len(self)))
