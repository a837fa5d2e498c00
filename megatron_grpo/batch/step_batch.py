"""The batch of a step: lengths and flags of sequences, references to their tokens, and their assignment to shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.packing import OF_TOKENS, Cost, planner
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.schema import Config


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """The sequences that a step trains on: numbers by sequence, and references to their tokens.

    Lives on the driver, without tokens. The stages of a step extend it; the handle of a model sends each replica its
    part, and a rollout worker reads it for computations over all tokens and for the file of rollouts. The samples of a
    prompt are neighbours.
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
    prob_error_limit: float | None = None
    """Largest token_mult_prob_error that the policy learns from; None: there is no limit."""
    shards: list[NDArray[np.int64]] = field(default_factory=list)
    """Numbers of the sequences of each shard, [sequences of the shard], int64, ascending; their tokens lie together in
    the object store. Every replica has whole shards."""
    fields: dict[str, list[Any]] = field(default_factory=dict)
    """By name of a stored field (`STORED_DTYPES`): for each shard, Ray's reference to an array, [tokens of it]."""

    @staticmethod
    def of_outcomes(config: Config, outcomes: Sequence[Outcome]) -> StepBatch:
        """The batch of a step's rollouts, not yet assigned to shards.

        The loss leaves out rollouts without a reward (no reward function gave one, or they failed), those whose loss
        multiplier is 0 and, with overlong_filtering, those that were cut off.
        """
        overlong, nll_weight = config.loop.overlong_filtering, config.loss_fn.positive_example_nll_weight
        weights = np.array([outcome.loss_multiplier or 1.0 for outcome in outcomes], dtype=np.float32)
        return StepBatch(
            lengths=np.array([outcome.tokens for outcome in outcomes], dtype=np.int64),
            response_tokens=np.array([outcome.response_tokens for outcome in outcomes], dtype=np.int64),
            in_loss=np.array(
                [
                    outcome.reward is not None and outcome.loss_multiplier > 0 and not (overlong and outcome.truncated)
                    for outcome in outcomes
                ]
            ),
            positive=np.array([bool(outcome.correct) for outcome in outcomes]) if nll_weight > 0 else None,
            weights=None if (weights == 1).all() else weights,
        )

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


def assign(config: Config, batch: StepBatch, cost: Cost = OF_TOKENS) -> list[NDArray[np.int64]]:
    """Assign sequences to shards: for each shard the numbers of its sequences, [sequences], int64, ascending.

    Every minibatch is divided equally over the shards, as its microbatches would be over as many replicas. With a
    value model, the number of shards is the least common multiple of both models' replicas, so that each replica has
    whole shards. If the minibatches of the models differ, the sequences between consecutive minibatch ends of either
    model are divided equally, so that every replica has a sequence in every minibatch.

    Args:
        config: layouts and minibatches of the trained models.
        batch: the sequences.
        cost: the policy's cost of a sequence, by which work is divided equally.
    """
    policy, value = config.policy, config.value_model
    trained = [policy] if value is None else [policy, value]
    shards = math.lcm(*(model.parallel.data for model in trained))
    if shards == 1:
        return [np.arange(len(batch))]
    sizes = [model.train_global_batch_samples or len(batch) for model in trained]
    ends = sorted({int(numbers[-1]) + 1 for size in sizes for numbers in batch.minibatches(size)})
    members: list[list[int]] = [[] for _ in range(shards)]
    for start, end in pairwise([0, *ends]):
        for shard, share in enumerate(planner(policy, cost).share(batch.lengths[start:end], shards)):
            members[shard] += [start + index for index in share]
    return [np.array(sorted(one), dtype=np.int64) for one in members]
