"""The batch of a step: numbers of each sequence, references to tokens, and the partitions of replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.images import Images
from megatron_grpo.batch.packing import TOKEN_COST, Cost, make_packer
from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.loop_schema import SampledLoopConfig
from megatron_grpo.config.schema import Config

StoredArray = Any  # Ray's ObjectRef to an array; losses import this module without Ray
TokenArrays = dict[str, NDArray[Any]]  # by field, [tokens of the step]: sequences end to end in the step's order


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """The sequences that a step trains on, without their tokens.

    A rollout is one sequence, or several segments, which are neighbours, as the samples of a prompt are. A partition is
    a set of sequences whose tokens share arrays in the object store.

    Example: three sequences on two replicas
        StepBatch(
            lengths=np.array([5, 9, 4]), response_tokens=np.array([2, 6, 1]), in_loss=np.array([True, True, False]),
            advantages=np.array([1.0, -1.0, 0.0]), partitions=[np.array([0, 2]), np.array([1])],
            fields={"token_ids": [ref_of_9_tokens, ref_of_9_tokens]},
        )
    """

    lengths: NDArray[np.int64]  # tokens of each sequence, prompt included: [sequences], int64
    rollouts: NDArray[np.int64] | None = None  # index of each sequence's rollout, ascending; None: one sequence each
    rollout_shares: NDArray[np.float32] | None = None
    """Share of its rollout's sampled tokens that each sequence has: [sequences], float32. None: all have 1."""
    response_tokens: NDArray[np.int64]  # sampled tokens of each sequence: [sequences], int64
    in_loss: NDArray[np.bool_]  # True if the loss is taken over the sampled tokens: [sequences], bool
    positive: NDArray[np.bool_] | None = None  # correct responses: [sequences], bool; None: the loss does not use it
    loss_weights: NDArray[np.float32] | None = None
    """Weight of each sequence in the loss (loss_multiplier of its prompt): [sequences], float32. None: all weigh 1."""
    imitated_tokens: NDArray[np.int64] | None = None
    """Tokens of each sequence that the loss imitates: [sequences], int64. They are those that others wrote after the
    first sampled one, or the response of a demonstration. None: none."""
    demonstrated: NDArray[np.bool_] | None = None
    """True for demonstrations, which are not in the policy-gradient loss: [sequences], bool. None: there are none."""
    advantages: NDArray[np.float32] | None = None
    """Advantage that all tokens of a response share: [sequences], float32. None: `fields` has one for each token."""
    teachers: NDArray[np.int64] | None = (
        None  # number of each sequence's teacher: [sequences]; None: one teacher, or none
    )
    images: list[Images] | None = None  # of each sequence; None: no sequence has one
    prob_error_limit: float | None = None  # largest token_mult_prob_error that the policy learns from; None: no limit
    partitions: list[NDArray[np.int64]] = field(default_factory=list)
    """Indices of the sequences of each partition, int64, ascending. A partition is never divided among replicas."""
    fields: dict[str, list[StoredArray]] = field(default_factory=dict)
    """By stored field (`STORED_DTYPES`), an array for each partition: [tokens of the partition]."""

    @staticmethod
    def from_outcomes(config: Config, outcomes: Sequence[Outcome]) -> StepBatch:
        """Make the batch of a step's rollouts, not yet partitioned.

        The loss leaves out rollouts without a reward (no reward function gave one, or they failed), those whose loss
        multiplier is 0 and, with overlong_filtering, those that were cut off. Distillation alone needs no reward.
        """
        needs_reward, loop = config.uses_rewards, config.loop
        overlong = isinstance(loop, SampledLoopConfig) and loop.overlong_filtering
        nll_weight = config.loss_fn.positive_example_nll_weight
        # A multiplier of 0 leaves the rollout out by `in_loss`: its weight is 1, so that equal weights remain None.
        weights = np.array([outcome.loss_multiplier or 1.0 for outcome in outcomes], dtype=np.float32)
        in_loss = np.array(
            [
                (outcome.reward is not None or (outcome.is_unscored and not needs_reward))
                and outcome.loss_multiplier > 0
                and not (overlong and outcome.truncated)
                for outcome in outcomes
            ]
        )
        positive = np.array([bool(outcome.correct) for outcome in outcomes]) if nll_weight > 0 else None
        sequences = [(i, *sizes) for i, outcome in enumerate(outcomes) for sizes in outcome.sequences]
        rollouts, lengths, response_tokens = np.array(sequences, dtype=np.int64).reshape(-1, 3).T
        by_rollout = np.array([outcome.response_tokens for outcome in outcomes], dtype=np.int64)
        # Everything that a rollout has once, its segments share: each sampled token is in the loss as the rollout is.
        has_segments = len(rollouts) > len(outcomes)
        shares = np.where(by_rollout[rollouts] > 0, response_tokens / np.maximum(by_rollout, 1)[rollouts], 1.0)
        return StepBatch(
            lengths=lengths.copy(),
            rollouts=rollouts.copy() if has_segments else None,
            rollout_shares=shares.astype(np.float32) if has_segments else None,
            response_tokens=response_tokens.copy(),
            in_loss=in_loss[rollouts],
            positive=None if positive is None else positive[rollouts],
            loss_weights=None if (weights == 1).all() else weights[rollouts],
            images=[images for outcome in outcomes for images in outcome.sequence_images]
            if any(outcome.images for outcome in outcomes)
            else None,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def loss_tokens(self) -> int:
        return int(self.response_tokens[self.in_loss].sum())

    def sum_by_rollout(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sum numbers of sequences, [sequences], over each rollout."""
        return values if self.rollouts is None else np.bincount(self.rollouts, weights=values).astype(np.int64)

    def repeat_by_sequence(self, values: NDArray[Any]) -> NDArray[Any]:
        """Repeat numbers of rollouts, [rollouts], for each sequence."""
        return values if self.rollouts is None else values[self.rollouts]

    def find_rollouts(self, sequences: Sequence[int]) -> list[int]:
        """Find the rollouts of some sequences, each once."""
        return list(dict.fromkeys(sequences if self.rollouts is None else self.rollouts[list(sequences)].tolist()))

    def split_minibatches(self, samples: int) -> Iterator[NDArray[np.int64]]:
        """Split into minibatches of `samples` rollouts; yields indices of sequences."""
        rollouts = np.arange(len(self)) if self.rollouts is None else self.rollouts
        for start in range(0, int(rollouts.max(initial=-1)) + 1, samples):
            begin, end = np.searchsorted(rollouts, [start, start + samples]).tolist()
            yield np.arange(begin, end)

    def select_partitions(self, chosen: slice) -> StepBatch:
        """Select some partitions, and number their sequences from 0."""
        # A replica's arrays lie partition after partition, as their tokens do in the object store.
        indices = np.concatenate(self.partitions[chosen])
        ends = np.cumsum([len(partition) for partition in self.partitions[chosen]])
        return StepBatch(
            lengths=self.lengths[indices],
            rollout_shares=None if self.rollout_shares is None else self.rollout_shares[indices],
            response_tokens=self.response_tokens[indices],
            in_loss=self.in_loss[indices],
            positive=None if self.positive is None else self.positive[indices],
            loss_weights=None if self.loss_weights is None else self.loss_weights[indices],
            imitated_tokens=None if self.imitated_tokens is None else self.imitated_tokens[indices],
            demonstrated=None if self.demonstrated is None else self.demonstrated[indices],
            advantages=None if self.advantages is None else self.advantages[indices],
            teachers=None if self.teachers is None else self.teachers[indices],
            images=None if self.images is None else [self.images[index] for index in indices],
            partitions=np.split(np.arange(len(indices)), ends[:-1]),
            fields={name: references[chosen] for name, references in self.fields.items()},
        )


def partition_sequences(config: Config, batch: StepBatch, cost: Cost = TOKEN_COST) -> list[NDArray[np.int64]]:
    """Divide a step's sequences into partitions of equal work (`StepBatch.partitions`)."""
    policy, value = config.policy, config.value_model
    trained = [policy] if value is None else [policy, value]
    # Each replica of any model needs whole partitions, so there is one for each of their least common multiple.
    count = math.lcm(*(model.parallel.data for model in (*trained, *config.teacher_models.values())))
    if count == 1:
        return [np.arange(len(batch))]
    # An optimizer step waits for its slowest replica, so each minibatch is divided equally by itself. Policy and value
    # model may have minibatches of different sizes: the step is cut wherever a minibatch of either ends, and each
    # stretch is divided, so that every replica has sequences in each minibatch of both.
    sizes = [model.train_global_batch_samples or len(batch) for model in trained]
    ends = sorted({int(indices[-1]) + 1 for size in sizes for indices in batch.split_minibatches(size)})
    partitions: list[list[int]] = [[] for _ in range(count)]
    packer = make_packer(policy, cost)
    for start, end in pairwise([0, *ends]):
        for part, share in zip(partitions, packer.assign_to_replicas(batch.lengths[start:end], count), strict=True):
            part += [start + index for index in share]
    return [np.array(sorted(partition), dtype=np.int64) for partition in partitions]
