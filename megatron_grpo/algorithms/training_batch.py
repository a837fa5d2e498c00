"""The batch of a step: which rollouts are in the loss, and their tokens in shards that the replicas fetch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.config.schema import Config
from megatron_grpo.data.batch import Shard, StepBatch
from megatron_grpo.data.bins import OF_TOKENS, Cost
from megatron_grpo.data.planning import planner
from megatron_grpo.data.trajectory import Outcome, SampledGroup
from megatron_grpo.rollouts.pool import RolloutPool


def training_batch(
    config: Config, groups: list[SampledGroup], rollouts: RolloutPool, cost: Cost = OF_TOKENS
) -> StepBatch:
    """Lay the rollouts of a step out in shards, one for each replica of the policy.

    The loss leaves out rollouts without a reward (nobody had an opinion, or they failed), those whose loss multiplier
    is 0 and, with overlong_filtering, those that were cut off.

    Args:
        config: layouts and minibatches, and what is left out of the loss.
        groups: rollouts of the step, a group for each prompt.
        rollouts: the pool whose workers put the shards into the object store.
        cost: what a sequence costs the policy, by which replicas get equally much to do.
    """
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    batch = without_tokens(config, outcomes)
    if config.loss_fn.positive_example_nll_weight > 0:
        batch.positive = np.array([bool(outcome.correct) for outcome in outcomes])
    sequences = assign(config, batch, cost)
    fields = rollouts.build_shards(groups, sequences)
    batch.shards = [Shard(numbers, built) for numbers, built in zip(sequences, fields, strict=True)]
    return batch


def without_tokens(config: Config, outcomes: Sequence[Outcome]) -> StepBatch:
    """The rollouts of a step by their lengths and by whether they are in the loss, without their tokens.

    Args:
        config: what is left out of the loss.
        outcomes: those of the rollouts, in the order of the step.
    """
    overlong = config.loop.overlong_filtering
    return StepBatch(
        lengths=np.array([outcome.tokens for outcome in outcomes], dtype=np.int64),
        response_tokens=np.array([outcome.response_tokens for outcome in outcomes], dtype=np.int64),
        in_loss=np.array(
            [
                outcome.reward is not None and outcome.loss_multiplier > 0 and not (overlong and outcome.truncated)
                for outcome in outcomes
            ]
        ),
    )


def assign(config: Config, batch: StepBatch, cost: Cost = OF_TOKENS) -> list[NDArray[np.int64]]:
    """For each shard the numbers of its sequences: [sequences of the shard], int64, ascending.

    Every minibatch is levelled over the shards, as its microbatches would be over as many replicas. With a value model
    in another layout there are as many shards as both numbers of replicas divide, so that each has whole ones; and with
    minibatches of its own, what lies between two ends of minibatches of either model is levelled: no replica is without
    a sequence in any minibatch.
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
