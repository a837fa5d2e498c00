"""The batch of a step: lengths and flags of sequences, and references to their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """The sequences that a step trains on: numbers by sequence, and references to their tokens.

    Lives on the driver, which never holds a token. The stages of a step extend it; the handle of a model sends each
    replica its part, and a rollout worker reads it for computations over all tokens and for the file of rollouts. The
    samples of a prompt are neighbours.
    """

    lengths: NDArray[np.int64]
    """[sequences], int64: tokens of each sequence, prompt included."""
    response_tokens: NDArray[np.int64]
    """[sequences], int64: number of sampled tokens of each sequence."""
    in_loss: NDArray[np.bool_]
    """[sequences], bool: whether the loss is taken over the sampled tokens."""
    positive: NDArray[np.bool_] | None = None
    """[sequences], bool: whether the response is correct; None: the loss does not use it."""
    weights: NDArray[np.float32] | None = None
    """[sequences], float32: weight of each sequence in the loss (loss_multiplier of its prompt); None: all weigh 1."""
    advantages: NDArray[np.float32] | None = None
    """[sequences], float32: advantage of all sampled tokens of a response; None: it differs by token, in the shards."""
    shards: list[NDArray[np.int64]] = field(default_factory=list)
    """Numbers of the sequences of each shard, [sequences of the shard], int64, ascending; their tokens lie together in
    the object store. Every replica has whole shards."""
    fields: dict[str, list[Any]] = field(default_factory=dict)
    """By name of a stored field (`STORED_DTYPES`): for each shard, Ray's reference to an array, [tokens of it]."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def loss_tokens(self) -> int:
        """Number of tokens that the loss is taken over."""
        return int(self.response_tokens[self.in_loss].sum())

    def minibatches(self, samples: int) -> Iterator[NDArray[np.int64]]:
        """Numbers of the sequences of each optimizer step in turn, [sequences], int64; neighbours stay together."""
        for start in range(0, len(self), samples):
            yield np.arange(start, min(start + samples, len(self)))

    def of_shards(self, mine: slice) -> StepBatch:
        """The part of the batch in some of its shards, its sequences numbered from 0 in the order of these shards."""
        numbers = np.concatenate(self.shards[mine])
        ends = np.cumsum([len(shard) for shard in self.shards[mine]])
        return StepBatch(
            lengths=self.lengths[numbers],
            response_tokens=self.response_tokens[numbers],
            in_loss=self.in_loss[numbers],
            positive=None if self.positive is None else self.positive[numbers],
            weights=None if self.weights is None else self.weights[numbers],
            advantages=None if self.advantages is None else self.advantages[numbers],
            shards=np.split(np.arange(len(numbers)), ends[:-1]),
            fields={name: references[mine] for name, references in self.fields.items()},
        )
