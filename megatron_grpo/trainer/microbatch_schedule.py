"""Assigns a step's sequences to the microbatches of replicas, by the cost of a forward pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.packing import Cost, make_packer
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models.flops import count_forward_flops
from megatron_grpo.models.shape import ModelShape

StepMicrobatches = list[NDArray[np.int64]]
"""A replica's microbatches: for each the indices, in the step, of its sequences: [sequences], int64."""


def derive_cost(shape: ModelShape) -> Cost:
    """Derive the cost of sequences: floating-point operations of a forward pass."""

    def count(length: int) -> float:
        return count_forward_flops(shape, [length])

    # `count_forward_flops` is linear in tokens and in query-key pairs of both kinds of layers. Two tokens make three
    # pairs in one sequence, and two in two sequences.
    every_pair = count(2) - 2 * count(1)
    window = shape.window
    if window is None:
        return Cost(per_token=count(1) - every_pair, per_pair=every_pair)
    if shape.chunked:
        # The first token of the second chunk sees itself in layers with chunks, and everything in the others.
        per_pair = (count(window + 1) - count(window) - count(1)) / window
    else:
        # For tokens past the window, only layers without a window add a key with each token.
        per_pair = count(window + 2) - 2 * count(window + 1) + count(window)
    return Cost(count(1) - every_pair, per_pair, window, every_pair - per_pair, chunked=shape.chunked)


def split_among_replicas(batch: StepBatch, replicas: int) -> list[slice]:
    """Split the step's partitions into equally long slices, one per replica."""
    partitions, remainder = divmod(len(batch.partitions), replicas)
    assert not remainder, "every replica has whole partitions"
    return [slice(start, start + partitions) for start in range(0, len(batch.partitions), partitions)]


def assign_microbatches(
    config: PolicyConfig, cost: Cost, batch: StepBatch, sequences: NDArray[np.int64], microbatch_tokens: int
) -> list[StepMicrobatches]:
    """Assign sequences, [chosen], int64, to the microbatches of the replicas that have them."""
    is_chosen = np.zeros(len(batch), dtype=np.bool_)
    is_chosen[sequences] = True
    slices = split_among_replicas(batch, config.parallel.data)
    by_replica = [np.sort(np.concatenate(batch.partitions[partitions])) for partitions in slices]
    by_replica = [indices[is_chosen[indices]] for indices in by_replica]
    packer = make_packer(config, cost, microbatch_tokens)
    schedules = packer.make_microbatches([batch.lengths[indices] for indices in by_replica])
    return [
        [indices[positions] for positions in schedule] for indices, schedule in zip(by_replica, schedules, strict=True)
    ]
