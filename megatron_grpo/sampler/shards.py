"""Tokens of a step in the object store: groups of trajectories, shards of sequences, and the file of rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from megatron_grpo.cluster.futures import pickled
from megatron_grpo.data.rollout_files import Learnt, StepRecord, Written, write_rollouts
from megatron_grpo.data.routed import RoutedForm
from megatron_grpo.data.step_batch import StepBatch
from megatron_grpo.data.trajectory import Outcome, SampledGroup, Trajectory

TOKEN_IDS, SAMPLED, GENERATION_LOGPROBS = "token_ids", "sampled", "generation_logprobs"
SHARD_FIELDS = (TOKEN_IDS, SAMPLED, GENERATION_LOGPROBS)
"""Entries of each token that rollouts bring."""
ROUTED_EXPERTS = "routed_experts"


def shard_fields(routed: RoutedForm | None) -> tuple[str, ...]:
    """Entries of each token that rollouts bring; `routed`: form of the experts that engines return, or None."""
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


BUNDLE_BYTES = 2**20
"""Token data that share an entry of the object store, which lives as long as any of its groups is referred to."""

TOKEN_BYTES = 8
"""Of a token id and its log-probability."""


@dataclass(frozen=True, slots=True)
class Payloads:
    """Where the trajectories of many groups are, for a message: each object is named once."""

    bundles: list[Any]
    """References (Ray's) to lists of groups."""
    places: NDArray[np.int32]
    """[groups, 2]: number of a group's bundle, and its place in there."""

    @staticmethod
    def of(payloads: Iterable[tuple[Any, int]]) -> Payloads:
        """Of groups (`SampledGroup.payload`), in their order."""
        numbers: dict[Any, int] = {}
        places = [(numbers.setdefault(bundle, len(numbers)), place) for bundle, place in payloads]
        return Payloads(list(numbers), np.array(places, dtype=np.int32).reshape(-1, 2))

    def each(self) -> list[tuple[Any, int]]:
        """`SampledGroup.payload` of each group."""
        return [(self.bundles[bundle], place) for bundle, place in self.places.tolist()]

    def fetch(self, timeout_s: float | None = None) -> list[list[Trajectory]]:
        """The trajectories of each group.

        Args:
            timeout_s: deadline; None: the caller has one for this process.

        Raises:
            RayError: some are lost, or late.
        """
        bundles = ray.get(self.bundles, timeout=timeout_s)
        return [bundles[bundle][place] for bundle, place in self.places.tolist()]


@dataclass(frozen=True, slots=True)
class Collected:
    """A worker's answer: its groups, in the order in which it was given their prompts."""

    payloads: Payloads
    outcomes: list[list[Outcome]]
    """Sent as `pickled`."""
    remarks: list[str]
    """Events for the log of the run, for instance that an environment's process was replaced."""


def groups_of(collected: Collected) -> list[SampledGroup]:
    """The groups of a worker's answer, in its order."""
    pairs = zip(collected.outcomes, collected.payloads.each(), strict=True)
    return [SampledGroup(outcomes, payload) for outcomes, payload in pairs]


class Bundler:
    """Puts groups into the object store as they arrive, small ones together, since every entry has a cost."""

    def __init__(self, groups: int) -> None:
        """
        Args:
            groups: how many will come.
        """
        self._payloads: list[Any] = [None] * groups
        self._outcomes: list[list[Outcome]] = [[] for _ in range(groups)]
        self._waiting: list[tuple[int, Sequence[Trajectory]]] = []
        self._bytes = 0

    def add(self, number: int, trajectories: Sequence[Trajectory]) -> None:
        """Take a group, to put it when enough have come together.

        Args:
            number: place of the group among all groups of the step.
            trajectories: samples of the group, in their order.
        """
        self._waiting.append((number, trajectories))
        self._outcomes[number] = [one.outcome for one in trajectories]
        for one in trajectories:
            self._bytes += TOKEN_BYTES * len(one.token_ids) + (0 if one.routed is None else one.routed.nbytes)
        if self._bytes >= BUNDLE_BYTES:
            self._put()

    def finish(self, remarks: list[str]) -> Collected:
        """The groups, when all have come, and remarks for the log of the run."""
        if self._waiting:
            self._put()
        return Collected(Payloads.of(self._payloads), pickled(self._outcomes), remarks)

    def _put(self) -> None:
        bundle = ray.put(pickled([trajectories for _, trajectories in self._waiting]))
        for place, (number, _) in enumerate(self._waiting):
            self._payloads[number] = (bundle, place)
        self._waiting, self._bytes = [], 0


def collected(groups: Sequence[Sequence[Trajectory]], remarks: list[str]) -> Collected:
    """Put groups that are at hand into the object store."""
    bundler = Bundler(len(groups))
    for number, trajectories in enumerate(groups):
        bundler.add(number, trajectories)
    return bundler.finish(remarks)


DUMPED_GROUPS = 64
"""Groups that are fetched together to be written."""


def learnt_so_far(batch: StepBatch) -> LearntFrom:
    """The advantages and log-probabilities that a step has, fetched; an entry that is lost with the process that held
    it counts as not computed."""
    arrays: dict[str, NDArray[np.float32]] = {}
    sequences = [shard.sequences for shard in batch.shards]
    for name in ("advantages", "prev_logprobs"):
        if name in batch.shards[0].fields:
            with suppress(RayError):
                found = ray.get([shard.fields[name] for shard in batch.shards])
                stored: list[dict[str, NDArray[Any]]] = [{name: array} for array in found]
                arrays |= gather_shards(stored, sequences, batch.lengths, [name])
    return LearntFrom(np.cumsum(batch.lengths) - batch.lengths, batch.advantages, arrays)


@dataclass(frozen=True, slots=True)
class LearntFrom:
    """The numbers of a step's sequences that its file of rollouts has beside them."""

    starts: NDArray[np.int64]
    """[sequences], int64: where each begins in the arrays."""
    by_response: NDArray[np.float32] | None
    arrays: dict[str, NDArray[np.float32]]
    """Entries by name, [tokens of the step]."""

    def of(self, number: int, trajectory: Trajectory) -> Learnt:
        """What is known of one sequence, by its number in the step."""
        spans = [np.arange(span.start, span.end) for span in trajectory.spans]
        places = self.starts[number] + (np.concatenate(spans) if spans else np.empty(0, dtype=np.int64))
        prev = self.arrays.get("prev_logprobs")
        advantages = self.arrays.get("advantages")
        of_tokens: NDArray[np.float32] | None
        if self.by_response is not None:
            of_tokens = np.full(len(places), self.by_response[number], dtype=np.float32)
        else:
            of_tokens = None if advantages is None else advantages[places]
        return Learnt(of_tokens, None if prev is None else prev[places])


def dump(payloads: Payloads, chosen: list[list[int]], batch: StepBatch | None, file: Path, record: StepRecord) -> None:
    """Write trajectories into a Parquet file, which appears when it is complete.

    Args:
        payloads: the groups of the step, in its order.
        chosen: for each group, which of its samples to write.
        batch: the step's batch of the same sequences, which count group by group; None: the step learns nothing.
        file: where.
        record: what the file says beside them.
    """

    def groups() -> Iterator[tuple[int, list[Written]]]:
        each, learnt = payloads.each(), None if batch is None else learnt_so_far(batch)
        samples = record.run.samples_per_prompt
        wanted = [number for number, places in enumerate(chosen) if places]
        for begin in range(0, len(wanted), DUMPED_GROUPS):
            numbers = wanted[begin : begin + DUMPED_GROUPS]
            fetched = Payloads.of([each[number] for number in numbers]).fetch()
            for number, trajectories in zip(numbers, fetched, strict=True):
                one_by_one = [(number * samples + place, trajectories[place]) for place in chosen[number]]
                yield (
                    number,
                    [(one, None if learnt is None else learnt.of(sequence, one)) for sequence, one in one_by_one],
                )

    write_rollouts(file, groups(), record.metadata())
