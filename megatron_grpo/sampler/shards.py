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

from megatron_grpo.cluster.futures import pickled
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.rollout_files import Learnt, StepFacts, StepRecord, Written, read_recorded, write_rollouts
from megatron_grpo.data.routed import RoutedForm
from megatron_grpo.data.step_batch import StepBatch
from megatron_grpo.data.trajectory import Outcome, SampledGroup, Trajectory


def shard_fields(routed: RoutedForm | None) -> tuple[str, ...]:
    """Entries of each token that rollouts bring; `routed`: form of the experts that engines return, or None."""
    fields = ("token_ids", "sampled", "generation_logprobs")
    return fields if routed is None else (*fields, "routed_experts")


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
        routed: form of the experts that engines return; None: engines return none.

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
    arrays = {"token_ids": token_ids, "sampled": sampled, "generation_logprobs": logprobs}
    if routed is not None:
        arrays["routed_experts"] = routed.laid_end_to_end([(len(one.token_ids), one.routed) for one in trajectories])
    return arrays


def build_shards(
    bundles: Bundles, shards: Sequence[NDArray[np.int32]], routed: RoutedForm | None
) -> tuple[NDArray[Any], ...]:
    """The arrays of each shard, shard by shard, in the order of `shard_fields`.

    Args:
        bundles: where the groups are that the sequences belong to.
        shards: per shard [sequences, 2], int32: in the shard's order, the number of each sequence's group in `bundles`
            and its place in that group.
        routed: form of the experts that engines return; None: engines return none.
    """
    groups = fetched(bundles)
    built = (shard_arrays([groups[group][sample] for group, sample in shard.tolist()], routed) for shard in shards)
    return tuple(arrays[name] for arrays in built for name in shard_fields(routed))


def gather_shards(
    parts: Sequence[NDArray[Any]], shards: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64]
) -> NDArray[Any]:
    """One entry of every token in the order of the step, from its arrays in shards.

    Args:
        parts: per shard [tokens of the shard], of one dtype.
        shards: per shard [sequences of the shard], int64: numbers of its sequences in the step (`StepBatch.shards`).
        lengths: [sequences of the step], int64: tokens of each sequence.

    Returns:
        [tokens of the step], in the dtype of the parts.
    """
    # A slice a sequence instead of one index of all tokens, which would take twice the memory of what it moves.
    whole = np.empty(int(lengths.sum()), dtype=parts[0].dtype)
    places = np.split(whole, np.cumsum(lengths)[:-1])
    for part, numbers in zip(parts, shards, strict=True):
        pieces = np.split(part, np.cumsum(lengths[numbers])[:-1])
        for number, piece in zip(numbers.tolist(), pieces, strict=False):
            places[number][:] = piece
    return whole


def split_by_shard(
    whole: NDArray[Any], shards: Sequence[NDArray[np.int64]], lengths: NDArray[np.int64]
) -> list[NDArray[Any]]:
    """One entry of every token, [tokens of the step], cut up into shards: the inverse of `gather_shards`."""
    pieces = np.split(whole, np.cumsum(lengths)[:-1])
    return [np.concatenate([whole[:0], *(pieces[number] for number in numbers.tolist())]) for numbers in shards]


Compute = Callable[..., tuple[dict[str, NDArray[Any]], Any]]
"""(lengths, arrays by name, ...) -> new arrays by name, each [tokens of the step], and a summary."""


def compute(
    fn: Compute,
    batch: StepBatch,
    fields: Sequence[str],
    arguments: Sequence[Any],
    get: Callable[[list[Any]], list[Any]] = ray.get,
) -> tuple[dict[str, list[Any]], Any]:
    """Run a function over the tokens of a whole step, in this process.

    Args:
        fn: called with `lengths`, a dict of the flat arrays of `fields` in the order of the step, and `arguments`.
        batch: the step's batch, whose shards hold the entries.
        fields: names of the entries that the function reads.
        arguments: further arguments of the function.
        get: fetches what references of Ray refer to.

    Returns:
        The new entries by name, for each shard a reference to its array (`StepBatch.fields`), and the summary.
    """
    arrays = {name: gather_shards(get(batch.fields[name]), batch.shards, batch.lengths) for name in fields}
    results, summary = fn(batch.lengths, arrays, *arguments)
    split = {name: split_by_shard(array, batch.shards, batch.lengths) for name, array in results.items()}
    return {name: [ray.put(part) for part in parts] for name, parts in split.items()}, summary


BUNDLE_BYTES = 2**20
"""Token data that share an entry of the object store, which lives as long as any of its groups is referred to."""

TOKEN_BYTES = 8
"""Bytes of a token id and its log-probability."""


Bundles = tuple[list[Any], NDArray[np.int32]]
"""Where the trajectories of groups are, for a message that names each object once: references (Ray's) to lists of
groups; and [groups, 2], int32: for each group the number of its list and its place in there."""


def bundled(groups: Sequence[SampledGroup]) -> Bundles:
    """Where groups are, in their order."""
    numbers: dict[Any, int] = {}
    places = [(numbers.setdefault(group.bundle, len(numbers)), group.place) for group in groups]
    return list(numbers), np.array(places, dtype=np.int32).reshape(-1, 2)


def fetched(bundles: Bundles, timeout_s: float | None = None) -> list[list[Trajectory]]:
    """The trajectories of each group; RayError if some are lost, or late. `timeout_s`: None where a caller has one."""
    references, places = bundles
    needed = np.unique(places[:, 0]).tolist()
    found = dict(zip(needed, ray.get([references[number] for number in needed], timeout=timeout_s), strict=True))
    return [found[number][place] for number, place in places.tolist()]


@dataclass(frozen=True, slots=True)
class Collected:
    """A worker's answer: its groups, in the order in which it was given their prompts."""

    bundles: Bundles
    outcomes: list[list[Outcome]]
    """Sent as `pickled`."""
    remarks: list[str]
    """Events for the log of the run, for instance that an environment's process was replaced."""


def groups_of(collected: Collected) -> list[SampledGroup]:
    """The groups of a worker's answer, in its order."""
    references, places = collected.bundles
    pairs = zip(collected.outcomes, places.tolist(), strict=True)
    return [SampledGroup(outcomes, references[number], place) for outcomes, (number, place) in pairs]


def collected(groups: Sequence[Sequence[Trajectory]], remarks: list[str]) -> Collected:
    """Put groups into the object store, small ones together, since every entry has a cost."""
    references: list[Any] = []
    waiting: list[Sequence[Trajectory]] = []
    places, size = np.zeros((len(groups), 2), dtype=np.int32), 0
    for number, trajectories in enumerate(groups):
        places[number] = len(references), len(waiting)
        waiting.append(trajectories)
        for one in trajectories:
            size += TOKEN_BYTES * len(one.token_ids) + (0 if one.routed is None else one.routed.nbytes)
        if size >= BUNDLE_BYTES or number == len(groups) - 1:
            references.append(ray.put(pickled(waiting)))
            waiting, size = [], 0
    return Collected((references, places), pickled([[one.outcome for one in group] for group in groups]), remarks)


def load(file: Path) -> tuple[StepFacts, Collected]:
    """Read a step's file: what is known of its sampling, and its groups as if they had been sampled here.

    Raises:
        RunError: it cannot be read.
    """
    try:
        facts, groups = read_recorded(file)
    except (OSError, ValueError) as error:
        raise RunError(f"the recorded rollouts cannot be read: {file} {error}") from None
    return facts, collected(groups, [])


DUMPED_GROUPS = 64
"""Groups that are fetched together to be written."""


def learnt_so_far(batch: StepBatch) -> dict[str, Sequence[NDArray[np.float32]]]:
    """The advantages and log-probabilities that a step has, fetched, by name, for each sequence [tokens], float32.

    An entry that is lost with the process that held it counts as not computed.
    """
    known: dict[str, Sequence[NDArray[np.float32]]] = {}
    for name in ("advantages", "prev_logprobs"):
        if name in batch.fields:
            with suppress(RayError):
                whole = gather_shards(ray.get(batch.fields[name]), batch.shards, batch.lengths)
                known[name] = np.split(whole, np.cumsum(batch.lengths)[:-1])
    if batch.advantages is not None:
        pairs = zip(batch.advantages, batch.lengths, strict=True)
        known["advantages"] = [np.broadcast_to(advantage, length) for advantage, length in pairs]
    return known


def learnt_from(known: Mapping[str, Sequence[NDArray[np.float32]]], number: int, trajectory: Trajectory) -> Learnt:
    """The numbers of the sampled tokens of one sequence, by its number in the step, of what `learnt_so_far` found."""
    spans = [np.arange(span.start, span.end) for span in trajectory.spans]
    places = np.concatenate([np.empty(0, dtype=np.int64), *spans])
    found = {name: values[number][places] for name, values in known.items()}
    return Learnt(found.get("advantages"), found.get("prev_logprobs"))


def dump(bundles: Bundles, chosen: list[list[int]], batch: StepBatch | None, file: Path, record: StepRecord) -> None:
    """Write trajectories into a Parquet file, which appears when it is complete (`StepTokens.dump`).

    `chosen` has the samples to write of each group in `bundles`; the batch's sequences count group by group.
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
