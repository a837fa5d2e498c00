"""Tokens of a step in the object store: groups of trajectories, shards of sequences, and the file of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from megatron_grpo.batch.rollout_files import (
    StepFacts,
    StepRecord,
    TrainedValues,
    Written,
    read_recorded_rollouts,
    write_rollouts,
)
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Outcome, SampledGroup, Trajectory
from megatron_grpo.cluster.futures import fetch_stored, wrap_for_pickling
from megatron_grpo.config.errors import RunError
from megatron_grpo.models.routed_experts import RoutedForm


def partition_fields(routed: RoutedForm | None) -> tuple[str, ...]:
    """Names of the entries of each token that rollouts have; `routed`: form of recorded experts, or None."""
    fields = ("token_ids", "sampled", "generation_logprobs")
    return fields if routed is None else (*fields, "routed_experts")


def places_of(sequences: Sequence[NDArray[np.int64]], sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return for every sequence of every shard its group and its place in the group.

    Args:
        sequences: per shard [sequences of the shard], int64: numbers of its sequences, numbered group by group.
        sizes: number of sequences of each group.
    """
    # side="right", so that a group without sequences owns none.
    ends = np.cumsum(sizes)
    begins = ends - np.asarray(sizes)
    places = []
    for numbers in sequences:
        owners = np.searchsorted(ends, numbers, side="right")
        places.append(list(zip(owners.tolist(), (numbers - begins[owners]).tolist(), strict=True)))
    return places


def evenly_chosen(sizes: Sequence[int], number: int | None) -> list[list[int]]:
    """Choose sequences spread evenly over all groups; returns for each group the places of its chosen sequences.

    Args:
        sizes: sequences of each group.
        number: number of sequences to choose; None: all.
    """
    total = sum(sizes)
    numbers = np.arange(total) if number is None or number >= total else np.arange(number) * total // number
    chosen: list[list[int]] = [[] for _ in sizes]
    for group, place in places_of([numbers], sizes)[0]:
        chosen[group].append(place)
    return chosen


def concatenate_trajectories(
    trajectories: Sequence[Trajectory], routed: RoutedForm | None = None
) -> dict[str, NDArray[Any]]:
    """Concatenate the tokens of trajectories.

    Args:
        trajectories: the sequences of the shard.
        routed: form of the recorded experts; None: none are recorded.

    Returns:
        token_ids (int32), sampled (bool: the token was sampled, not given) and generation_logprobs (float32: the
        log-probability under which it was drawn, 0 for given tokens), each [tokens of all trajectories]; and with
        `routed` routed_experts, [tokens of all trajectories, experts recorded per token].
    """
    total = sum(len(one.token_ids) for one in trajectories)
    token_ids = np.empty(total, dtype=np.int32)
    sampled = np.zeros(total, dtype=np.bool_)
    logprobs = np.zeros(total, dtype=np.float32)
    begin = 0
    # A trajectory has log-probabilities only of its sampled tokens, span after span.
    for one in trajectories:
        token_ids[begin : begin + len(one.token_ids)] = one.token_ids
        taken = 0
        for span in one.spans:
            count = span.end - span.start
            sampled[begin + span.start : begin + span.end] = True
            logprobs[begin + span.start : begin + span.end] = one.logprobs[taken : taken + count]
            taken += count
        begin += len(one.token_ids)
    arrays = {"token_ids": token_ids, "sampled": sampled, "generation_logprobs": logprobs}
    if routed is not None:
        arrays["routed_experts"] = routed.concatenate([(len(one.token_ids), one.routed) for one in trajectories])
    return arrays


def build_partitions(
    bundles: Bundles, shards: Sequence[NDArray[np.int32]], routed: RoutedForm | None
) -> tuple[NDArray[Any], ...]:
    """Build the arrays of each shard, shard by shard, in the order of `partition_fields`.

    Args:
        bundles: location of the groups of the sequences.
        shards: per shard [sequences, 2], int32: for each sequence, in the shard's order, the number of its group in
            `bundles` and its place in that group.
        routed: form of the recorded experts; None: none are recorded.
    """
    groups = fetched(bundles)
    built = (
        concatenate_trajectories([groups[group][sample] for group, sample in shard.tolist()], routed)
        for shard in shards
    )
    return tuple(arrays[name] for arrays in built for name in partition_fields(routed))


def gather_partitions(
    parts: Sequence[NDArray[Any]], shards: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64]
) -> NDArray[Any]:
    """Concatenate one entry of all tokens in the order of the step, from its arrays in shards.

    Args:
        parts: per shard [tokens of the shard], of one dtype.
        shards: per shard [sequences], int64: indices of its sequences in the step (`StepBatch.partitions`).
        lengths: [sequences of the step], int64: tokens of each sequence.

    Returns:
        [tokens of the step], in the dtype of the parts.
    """
    # One slice per sequence, because one index of all tokens would take twice the memory of the data.
    whole = np.empty(int(lengths.sum()), dtype=parts[0].dtype)
    places = np.split(whole, np.cumsum(lengths)[:-1])
    for part, numbers in zip(parts, shards, strict=True):
        pieces = np.split(part, np.cumsum(lengths[numbers])[:-1])
        for number, piece in zip(numbers.tolist(), pieces, strict=False):
            places[number][:] = piece
    return whole


def split_by_partition(
    whole: NDArray[Any], shards: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64]
) -> list[NDArray[Any]]:
    """Split one entry of all tokens, [tokens of the step], into shards: the inverse of `gather_partitions`."""
    pieces = np.split(whole, np.cumsum(lengths)[:-1])
    return [np.concatenate([whole[:0], *(pieces[number] for number in numbers.tolist())]) for numbers in shards]


Compute = Callable[..., tuple[dict[str, NDArray[Any]], Any]]
"""Function of (lengths, arrays by name, ...) that returns new arrays by name, [tokens of the step], and a summary."""


def compute(
    fn: Compute,
    batch: StepBatch,
    fields: Sequence[str],
    arguments: Sequence[Any],
) -> tuple[dict[str, list[Any]], Any]:
    """Run a function over the tokens of a whole step, in this process.

    Args:
        fn: called with `lengths`, a dict of the flat arrays of `fields` in the order of the step, and `arguments`.
        batch: the step's batch, whose shards hold the entries.
        fields: names of the entries that the function reads.
        arguments: further arguments of the function.

    Returns:
        The new entries by name, for each shard a reference to its array (`StepBatch.fields`), and the summary.
    """
    shards = {name: fetch_stored(batch.fields[name], f"the step's {name}") for name in fields}
    arrays = {name: gather_partitions(shards[name], batch.partitions, batch.lengths) for name in fields}
    results, summary = fn(batch.lengths, arrays, *arguments)
    split = {name: split_by_partition(array, batch.partitions, batch.lengths) for name, array in results.items()}
    return {name: [ray.put(part) for part in parts] for name, parts in split.items()}, summary


BUNDLE_BYTES = 2**20
"""Size of token data that shares one Ray object, which lives as long as a reference to any of its groups."""

TOKEN_BYTES = 8
"""Bytes of a token id and its log-probability."""


Bundles = tuple[list[Any], NDArray[np.int32]]
"""Location of the trajectories of groups, with each Ray object named once: references to lists of groups; and
[groups, 2], int32: for each group the number of its list and its place in that list."""


def bundled(groups: Sequence[SampledGroup]) -> Bundles:
    """Location of groups, in their order."""
    numbers: dict[Any, int] = {}
    places = [(numbers.setdefault(group.objects_ref, len(numbers)), group.index_in_ref) for group in groups]
    return list(numbers), np.array(places, dtype=np.int32).reshape(-1, 2)


def fetched(bundles: Bundles, timeout_s: float | None = None) -> list[list[Trajectory]]:
    """Fetch the trajectories of each group within timeout_s (None: no limit); RayError if one is lost or overdue."""
    references, places = bundles
    needed = np.unique(places[:, 0]).tolist()
    found = dict(zip(needed, ray.get([references[number] for number in needed], timeout=timeout_s), strict=True))
    return [found[number][place] for number, place in places.tolist()]


@dataclass(frozen=True, slots=True)
class Collected:
    """A worker's answer to `hand_over`: groups, in the order in which they were requested."""

    bundles: Bundles
    outcomes: list[list[Outcome]]
    """Outcomes of each group; sent as `wrap_for_pickling`."""
    remarks: list[str]
    """Events for the log of the run, such as the replacement of an environment process."""


def groups_of(collected: Collected) -> list[SampledGroup]:
    """The groups of a worker's answer, in their order."""
    references, places = collected.bundles
    pairs = zip(collected.outcomes, places.tolist(), strict=True)
    return [SampledGroup(outcomes, references[number], place) for outcomes, (number, place) in pairs]


def collected(groups: Sequence[Sequence[Trajectory]], remarks: list[str]) -> Collected:
    """Put groups into the object store, small ones together, because every object has a cost."""
    references: list[Any] = []
    waiting: list[Sequence[Trajectory]] = []
    places, size = np.zeros((len(groups), 2), dtype=np.int32), 0
    for number, trajectories in enumerate(groups):
        places[number] = len(references), len(waiting)
        waiting.append(trajectories)
        for one in trajectories:
            size += TOKEN_BYTES * len(one.token_ids) + (0 if one.routed is None else one.routed.nbytes)
        if size >= BUNDLE_BYTES or number == len(groups) - 1:
            references.append(ray.put(wrap_for_pickling(waiting)))
            waiting, size = [], 0
    return Collected(
        (references, places), wrap_for_pickling([[one.outcome for one in group] for group in groups]), remarks
    )


def load(file: Path) -> tuple[StepFacts, Collected]:
    """Read a step's file of rollouts: facts of their sampling, and their groups.

    Raises:
        RunError: the file cannot be read.
    """
    try:
        facts, groups = read_recorded_rollouts(file)
    except (OSError, ValueError) as error:
        raise RunError(f"the recorded rollouts cannot be read: {file} {error}") from None
    return facts, collected(groups, [])


DUMPED_GROUPS = 64
"""Number of groups that are fetched at a time to be written."""


def learnt_so_far(batch: StepBatch) -> dict[str, Sequence[NDArray[np.float32]]]:
    """Fetch the advantages and log-probabilities that a step has: by name, for each sequence [tokens], float32.

    An entry that was lost with its process is left out, like one that was not computed.
    """
    known: dict[str, Sequence[NDArray[np.float32]]] = {}
    for name in ("advantages", "prev_logprobs"):
        if name in batch.fields:
            with suppress(RayError):
                whole = gather_partitions(ray.get(batch.fields[name]), batch.partitions, batch.lengths)
                known[name] = np.split(whole, np.cumsum(batch.lengths)[:-1])
    if batch.advantages is not None:
        pairs = zip(batch.advantages, batch.lengths, strict=True)
        known["advantages"] = [np.broadcast_to(advantage, length) for advantage, length in pairs]
    return known


def learnt_from(
    known: Mapping[str, Sequence[NDArray[np.float32]]], number: int, trajectory: Trajectory
) -> TrainedValues:
    """Select the values of one sequence's sampled tokens from `learnt_so_far`; `number`: its number in the step."""
    spans = [np.arange(span.start, span.end) for span in trajectory.spans]
    places = np.concatenate([np.empty(0, dtype=np.int64), *spans])
    found = {name: values[number][places] for name, values in known.items()}
    return TrainedValues(found.get("advantages"), found.get("prev_logprobs"))


def dump(bundles: Bundles, chosen: list[list[int]], batch: StepBatch | None, file: Path, record: StepRecord) -> None:
    """Write trajectories into a Parquet file, which appears only when it is complete (see `RolloutWorkers.dump`).

    `chosen`: for each group in `bundles` its samples to write. Sequences of the batch are numbered group by group.
    """

    def groups() -> Iterator[tuple[int, list[Written]]]:
        references, places = bundles
        known = None if batch is None else learnt_so_far(batch)
        samples = record.run.samples_per_prompt
        wanted = [number for number, samples_of in enumerate(chosen) if samples_of]
        for begin in range(0, len(wanted), DUMPED_GROUPS):
            numbers = wanted[begin : begin + DUMPED_GROUPS]
            for number, trajectories in zip(numbers, fetched((references, places[numbers])), strict=True):
                written = [(trajectories[place], number * samples + place) for place in chosen[number]]
                yield number, [(one, None if known is None else learnt_from(known, at, one)) for one, at in written]

    write_rollouts(file, groups(), record.metadata())
