"""Tokens of a step as flat arrays: one array per field and partition, in the object store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from megatron_grpo.batch.step_batch import StepBatch, TokenArrays
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.cluster.futures import fetch_stored
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.rollouts.stored_groups import PackedGroups

TokenFunction = Callable[..., tuple[TokenArrays, Any]]
"""Function of (lengths, arrays by field, ...) that returns arrays of new fields, and a summary."""


def list_rollout_fields(routed: RoutedForm | None) -> tuple[str, ...]:
    """List the fields that rollouts have."""
    fields = ("token_ids", "sampled", "generation_logprobs")
    return fields if routed is None else (*fields, "routed_experts")


def locate_sequences(
    partitions: Sequence[NDArray[np.int64]], group_sizes: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Find each sequence's group, and its index in the group.

    Args:
        partitions: indices of the sequences of each partition, int64, group by group.
        group_sizes: number of sequences of each group.
    """
    # Sequence i is in the first group whose end is above i: side="right", so that a group without sequences has none.
    ends = np.cumsum(group_sizes)
    begins = ends - np.asarray(group_sizes)
    located = []
    for indices in partitions:
        groups = np.searchsorted(ends, indices, side="right")
        located.append(list(zip(groups.tolist(), (indices - begins[groups]).tolist(), strict=True)))
    return located


def concatenate_trajectories(trajectories: Sequence[Trajectory], routed: RoutedForm | None = None) -> TokenArrays:
    """Concatenate the tokens of trajectories.

    Args:
        trajectories: the sequences of a partition.
        routed: form of the recorded experts; None: none are recorded.

    Returns:
        Arrays [tokens of all trajectories]: token_ids (int32), sampled (bool: the token was sampled, not given),
        generation_logprobs (float32: the log-probability under which it was drawn, 0 for given tokens); and with
        `routed` routed_experts, [tokens of all trajectories, experts recorded per token].
    """
    total = sum(trajectory.tokens for trajectory in trajectories)
    token_ids = np.empty(total, dtype=np.int32)
    sampled = np.zeros(total, dtype=np.bool_)
    logprobs = np.zeros(total, dtype=np.float32)
    begin = 0
    # A trajectory has log-probabilities only of its sampled tokens, span after span.
    for trajectory in trajectories:
        token_ids[begin : begin + trajectory.tokens] = trajectory.token_ids
        first = 0
        for span in trajectory.spans:
            count = span.end - span.start
            sampled[begin + span.start : begin + span.end] = True
            logprobs[begin + span.start : begin + span.end] = trajectory.logprobs[first : first + count]
            first += count
        begin += trajectory.tokens
    arrays = {"token_ids": token_ids, "sampled": sampled, "generation_logprobs": logprobs}
    if routed is not None:
        arrays["routed_experts"] = routed.concatenate(
            [(trajectory.tokens, trajectory.routed) for trajectory in trajectories]
        )
    return arrays


def build_partitions(
    groups: PackedGroups, located: Sequence[NDArray[np.int32]], routed: RoutedForm | None
) -> tuple[NDArray[Any], ...]:
    """Build the arrays of partitions, field by field.

    Args:
        groups: groups of the sequences.
        located: for each partition [sequences, 2], int32: for each sequence the index of its group in `groups`, and its
            index in that group.
        routed: form of the recorded experts; None: none are recorded.
    """
    trajectories = groups.fetch()
    built = (
        concatenate_trajectories([trajectories[group][sample] for group, sample in sequences.tolist()], routed)
        for sequences in located
    )
    return tuple(arrays[name] for arrays in built for name in list_rollout_fields(routed))


def gather_partitions(
    parts: Sequence[NDArray[Any]], partitions: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64]
) -> NDArray[Any]:
    """Concatenate a field of all tokens in the step's order.

    Args:
        parts: the field in each partition, [tokens of the partition], of one dtype.
        partitions: indices of the sequences of each partition, int64 (`StepBatch.partitions`).
        lengths: tokens of each sequence of the step: [sequences], int64.
    """
    # One slice per sequence, because one index of all tokens would take twice the memory of the data.
    gathered = np.empty(int(lengths.sum()), dtype=parts[0].dtype)
    slots = np.split(gathered, np.cumsum(lengths)[:-1])
    for part, indices in zip(parts, partitions, strict=True):
        pieces = np.split(part, np.cumsum(lengths[indices])[:-1])
        for index, piece in zip(indices.tolist(), pieces, strict=False):
            slots[index][:] = piece
    return gathered


def split_by_partition(
    values: NDArray[Any], partitions: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64]
) -> list[NDArray[Any]]:
    """Split a field into partitions: the inverse of `gather_partitions`."""
    pieces = np.split(values, np.cumsum(lengths)[:-1])
    return [np.concatenate([values[:0], *(pieces[index] for index in indices.tolist())]) for indices in partitions]


def compute_over_tokens(
    fn: TokenFunction, batch: StepBatch, fields: Sequence[str], arguments: Sequence[Any]
) -> tuple[dict[str, list[Any]], Any]:
    """Run a function over a step's tokens in this process.

    Returns:
        The new fields by name, for each partition a reference to its array (`StepBatch.fields`), and the summary.
    """
    parts = {name: fetch_stored(batch.fields[name], f"the step's {name}") for name in fields}
    arrays = {name: gather_partitions(parts[name], batch.partitions, batch.lengths) for name in fields}
    new_arrays, summary = fn(batch.lengths, arrays, *arguments)
    split = {name: split_by_partition(array, batch.partitions, batch.lengths) for name, array in new_arrays.items()}
    return {name: [ray.put(part) for part in new_parts] for name, new_parts in split.items()}, summary
