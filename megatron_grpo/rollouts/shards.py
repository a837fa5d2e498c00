"""Flat arrays of many sequences: shards of them, and from shards back to the order of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.models.routed import RoutedForm

TOKEN_IDS, SAMPLED, GENERATION_LOGPROBS = "token_ids", "sampled", "generation_logprobs"
SHARD_FIELDS = (TOKEN_IDS, SAMPLED, GENERATION_LOGPROBS)
"""What is known of each token when the rollouts of a step are there."""
ROUTED_EXPERTS = "routed_experts"


def shard_fields(routed: RoutedForm | None) -> tuple[str, ...]:
    """What is known of each token; `routed`: what the experts look like that engines return, None: they do not."""
    return SHARD_FIELDS if routed is None else (*SHARD_FIELDS, ROUTED_EXPERTS)


def places_of(sequences: Sequence[NDArray[np.int64]], sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For every sequence of every shard, its group and its place in the group.

    Args:
        sequences: per shard [sequences of the shard], int64: numbers of its sequences, which count group by group.
        sizes: number of sequences of each group.
    """
    # Searched from the right, so that a group without sequences owns none.
    ends = np.cumsum(sizes)
    begins = ends - np.asarray(sizes)
    places = []
    for numbers in sequences:
        owners = np.searchsorted(ends, numbers, side="right")
        places.append(list(zip(owners.tolist(), (numbers - begins[owners]).tolist(), strict=True)))
    return places


def evenly_chosen(sizes: Sequence[int], number: int | None) -> list[list[int]]:
    """For each group the places of those of its sequences that belong to a choice spread evenly over all groups.

    Args:
        sizes: sequences of each group.
        number: how many to choose; None: all.
    """
    total = sum(sizes)
    numbers = np.arange(total) if number is None or number >= total else np.arange(number) * total // number
    chosen: list[list[int]] = [[] for _ in sizes]
    for group, place in places_of([numbers], sizes)[0]:
        chosen[group].append(place)
    return chosen


def shard_arrays(trajectories: Sequence[Trajectory], routed: RoutedForm | None = None) -> dict[str, NDArray[Any]]:
    """The tokens of trajectories laid end to end.

    Args:
        trajectories: the sequences of the shard.
        routed: what the experts look like that engines return; None: they do not.

    Returns:
        token_ids (int32), sampled (bool: whether the token was sampled rather than given) and generation_logprobs
        (float32: under which it was drawn, 0 for tokens that were given), each [tokens of all trajectories]; and with
        `routed` routed_experts, [tokens of all trajectories, numbers of a token].
    """
    total = sum(len(one.token_ids) for one in trajectories)
    token_ids = np.empty(total, dtype=np.int32)
    sampled = np.zeros(total, dtype=np.bool_)
    logprobs = np.zeros(total, dtype=np.float32)
    begin = 0
    # A trajectory has log-probabilities of its sampled tokens alone, span after span; here each gets its place.
    for one in trajectories:
        token_ids[begin : begin + len(one.token_ids)] = one.token_ids
        taken = 0
        for span in one.spans:
            count = span.end - span.start
            sampled[begin + span.start : begin + span.end] = True
            logprobs[begin + span.start : begin + span.end] = one.logprobs[taken : taken + count]
            taken += count
        begin += len(one.token_ids)
    arrays = {TOKEN_IDS: token_ids, SAMPLED: sampled, GENERATION_LOGPROBS: logprobs}
    if routed is not None:
        arrays[ROUTED_EXPERTS] = routed.laid_end_to_end([(len(one.token_ids), one.routed) for one in trajectories])
    return arrays


def gather_shards(
    shards: Sequence[Mapping[str, NDArray[Any]]],
    sequences: Sequence[NDArray[np.int64]],
    lengths: NDArray[np.int64],
    fields: Iterable[str],
) -> dict[str, NDArray[Any]]:
    """Flat arrays in the order of the step, of what is spread over shards.

    Args:
        shards: per shard the arrays of `fields` by name, [tokens of the shard], of one dtype for each name.
        sequences: per shard [sequences of the shard], int64: numbers of its sequences in the step, in the order in
            which they lie in the shard.
        lengths: [sequences of the step], int64: tokens of each sequence.
        fields: names of the arrays to gather.

    Returns:
        [tokens of the step] for each field, in the type that the shards have.
    """
    # A slice a sequence instead of one index of all tokens, which would take twice the memory of what it moves.
    ends = np.cumsum(lengths)
    gathered = {name: np.empty(int(ends[-1]), dtype=shards[0][name].dtype) for name in fields}
    for shard, numbers in zip(shards, sequences, strict=True):
        begin = 0
        for number in numbers.tolist():
            end, length = int(ends[number]), int(lengths[number])
            for name, whole in gathered.items():
                whole[end - length : end] = shard[name][begin : begin + length]
            begin += length
    return gathered


def split_by_shard(
    arrays: Mapping[str, NDArray[Any]], sequences: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64]
) -> list[dict[str, NDArray[Any]]]:
    """Flat arrays in the order of the step, cut up into shards: the inverse of `gather_shards`.

    Args:
        arrays: arrays by name, [tokens of the step], of any dtype.
        sequences: per shard [sequences of the shard], int64: numbers of its sequences in the step.
        lengths: [sequences of the step], int64: tokens of each sequence.

    Returns:
        Per shard the arrays by name, [tokens of the shard], in the dtype that they came in.
    """
    ends = np.cumsum(lengths)
    begins = ends - lengths
    return [
        {
            name: np.concatenate([array[begins[number] : ends[number]] for number in numbers.tolist()] or [array[:0]])
            for name, array in arrays.items()
        }
        for numbers in sequences
    ]
