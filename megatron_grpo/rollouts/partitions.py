"""A step's rollouts in Ray's object store, by group and by partition, and their way into files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from megatron_grpo.batch.rollout_files import StepRecord, TrainedValues, write_rollouts
from megatron_grpo.batch.step_batch import StepBatch, TokenArrays
from megatron_grpo.batch.trajectory import Outcome, SampledGroup, Trajectory
from megatron_grpo.cluster.futures import fetch_stored, wrap_for_pickling
from megatron_grpo.models.routed_experts import RoutedForm

TokenFunction = Callable[..., tuple[TokenArrays, Any]]  # (lengths, arrays by field, ...) to new arrays, summary
Partitions = Sequence[NDArray[np.int64]]  # indices of each partition's sequences
OBJECT_BYTES = 2**20  # size of token data that shares one Ray object
TOKEN_BYTES = 8  # of a token id and its log-probability
WRITTEN_GROUPS = 64  # most groups in memory at a time while rollouts are written


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """References to groups of trajectories, each object named once.

    Example: of three groups, two small ones share an object:
        PackedGroups([ref_a, ref_b], array([[0, 0], [0, 1], [1, 0]]))
    """

    references: list[Any]  # Ray's references to lists of groups
    indices: NDArray[np.int32]  # [groups, 2], int32: index of each group's reference, and its index in that list
    outcomes: list[list[Outcome]] = field(default_factory=list)  # by group, for the driver; empty: only tokens

    def fetch(self, timeout_s: float | None = None) -> list[list[Trajectory]]:
        """Fetch the trajectories of each group; RayError if lost."""
        # Each object is fetched once, however many of its groups are needed.
        needed = np.unique(self.indices[:, 0]).tolist()
        objects = ray.get([self.references[number] for number in needed], timeout=timeout_s)
        groups = dict(zip(needed, objects, strict=True))
        return [groups[number][index] for number, index in self.indices.tolist()]

    def to_message(self) -> PackedGroups:
        """Wrap the outcomes, so that Ray pickles them fast."""
        return replace(self, outcomes=wrap_for_pickling(self.outcomes))

    def unpack(self) -> list[SampledGroup]:
        """Convert to one reference for each group."""
        pairs = zip(self.outcomes, self.indices.tolist(), strict=True)
        return [SampledGroup(outcomes, self.references[number], index) for outcomes, (number, index) in pairs]


def pack_groups(groups: Sequence[SampledGroup]) -> PackedGroups:
    """Pack the references of groups, without their outcomes."""
    numbers: dict[Any, int] = {}
    indices = [(numbers.setdefault(group.objects_ref, len(numbers)), group.index_in_ref) for group in groups]
    return PackedGroups(list(numbers), np.array(indices, dtype=np.int32).reshape(-1, 2))


def store_groups(groups: Sequence[Sequence[Trajectory]]) -> PackedGroups:
    """Put groups into the object store, in their order."""
    references: list[Any] = []
    current: list[Sequence[Trajectory]] = []  # groups of the next object
    indices, size = np.zeros((len(groups), 2), dtype=np.int32), 0
    # Every Ray object has a cost of its own, so groups are put together until they have OBJECT_BYTES. Larger objects
    # would stay in memory as long as any of their groups, such as one that waits for a later step.
    for number, trajectories in enumerate(groups):
        indices[number] = len(references), len(current)
        current.append(trajectories)
        for trajectory in trajectories:
            size += TOKEN_BYTES * trajectory.tokens + (0 if trajectory.routed is None else trajectory.routed.nbytes)
        if size >= OBJECT_BYTES or number == len(groups) - 1:
            references.append(ray.put(wrap_for_pickling(current)))
            current, size = [], 0
    return PackedGroups(references, indices, [[trajectory.outcome for trajectory in group] for group in groups])


def list_rollout_fields(routed: RoutedForm | None) -> tuple[str, ...]:
    fields = ("token_ids", "sampled", "generation_logprobs")
    return fields if routed is None else (*fields, "routed_experts")


def count_sequences(outcomes: Sequence[Outcome]) -> int:
    return sum(len(outcome.sequences) for outcome in outcomes)


def locate_sequences(partitions: Partitions, group_sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Find each sequence's group, and its index in the group."""
    # Sequence i is in the first group whose end is above i: side="right", so that a group without sequences has none.
    ends = np.cumsum(group_sizes)
    begins = ends - np.asarray(group_sizes)
    located = []
    for indices in partitions:
        groups = np.searchsorted(ends, indices, side="right")
        located.append(list(zip(groups.tolist(), (indices - begins[groups]).tolist(), strict=True)))
    return located


def concatenate_trajectories(trajectories: Sequence[Trajectory], routed: RoutedForm | None = None) -> TokenArrays:
    """Concatenate the tokens of a partition's trajectories.

    Returns arrays [tokens of all trajectories]: token_ids (int32), sampled (bool: the token was sampled, not given),
    generation_logprobs (float32: the log-probability under which it was drawn, 0 for given tokens); and with `routed`,
    the form of recorded experts, routed_experts, [tokens of all trajectories, experts recorded per token].
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
        pairs = [(trajectory.tokens, trajectory.routed) for trajectory in trajectories]
        arrays["routed_experts"] = routed.concatenate(pairs)
    return arrays


def build_partitions(
    groups: PackedGroups, located: Sequence[NDArray[np.int32]], routed: RoutedForm | None
) -> tuple[NDArray[Any], ...]:
    """Build the arrays of partitions, field by field.

    `located` has for each partition [sequences, 2], int32: for each sequence the index of its group in `groups`, and
    its index among the sequences of that group.
    """
    trajectories = [[part for sample in group for part in sample.split_segments()] for group in groups.fetch()]
    built = (
        concatenate_trajectories([trajectories[group][index] for group, index in sequences.tolist()], routed)
        for sequences in located
    )
    return tuple(arrays[name] for arrays in built for name in list_rollout_fields(routed))


def gather_partitions(
    parts: Sequence[NDArray[Any]], partitions: Partitions, lengths: NDArray[np.int64]
) -> NDArray[Any]:
    """Concatenate a field's parts, [tokens of the partition, ...], in the step's order."""
    # One slice per sequence, because one index of all tokens would take twice the memory of the data.
    gathered = np.empty((int(lengths.sum()), *parts[0].shape[1:]), dtype=parts[0].dtype)
    slots = np.split(gathered, np.cumsum(lengths)[:-1])
    for part, indices in zip(parts, partitions, strict=True):
        pieces = np.split(part, np.cumsum(lengths[indices])[:-1])
        for index, piece in zip(indices.tolist(), pieces, strict=False):
            slots[index][:] = piece
    return gathered


def split_by_partition(values: NDArray[Any], partitions: Partitions, lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Split a field into partitions: the inverse of `gather_partitions`."""
    pieces = np.split(values, np.cumsum(lengths)[:-1])
    return [np.concatenate([values[:0], *(pieces[index] for index in indices.tolist())]) for indices in partitions]


def compute_over_tokens(
    fn: TokenFunction, batch: StepBatch, fields: Sequence[str], arguments: Sequence[Any]
) -> tuple[dict[str, list[Any]], Any]:
    """Run a function over a step's tokens here; returns new `StepBatch.fields`, and the summary."""
    parts = {name: fetch_stored(batch.fields[name], f"the step's {name}") for name in fields}
    arrays = {name: gather_partitions(parts[name], batch.partitions, batch.lengths) for name in fields}
    new_arrays, summary = fn(batch.lengths, arrays, *arguments)
    split = {name: split_by_partition(array, batch.partitions, batch.lengths) for name, array in new_arrays.items()}
    return {name: [ray.put(part) for part in new_parts] for name, new_parts in split.items()}, summary


def exchange_prompts(
    lengths: NDArray[np.int64],
    arrays: TokenArrays,
    partitions: Partitions,
    prompts: Sequence[NDArray[np.int32]],
    longest: int,
) -> tuple[TokenArrays, tuple[NDArray[np.int64], NDArray[np.bool_], dict[str, list[Any]]]]:
    """Exchange the prompts of a step's sequences.

    Args:
        arrays: token_ids and sampled.
        partitions: indices of the sequences in each partition, before and after the exchange.
        prompts: by sequence, the token ids of its other prompt.
        longest: most tokens of a sequence; one that would be longer keeps its prompt.

    Returns the lengths of the sequences, [sequences], int64; whether they have the other prompt, bool; and their fields
    token_ids and sampled by partition.
    """
    ends = np.cumsum(lengths)[:-1]
    sequences = zip(*(np.split(arrays[name], ends) for name in ("token_ids", "sampled")), prompts, strict=True)
    exchanged, fits = [], []
    for token_ids, sampled, prompt in sequences:
        first = int(sampled.argmax()) if sampled.any() else len(sampled)  # where the first response begins
        fits.append(len(prompt) + len(token_ids) - first <= longest)
        beginning = prompt if fits[-1] else token_ids[:first]
        mask = np.concatenate([np.zeros(len(beginning), dtype=np.bool_), sampled[first:]])
        exchanged.append((np.concatenate([beginning, token_ids[first:]]), mask))
    fields = {
        name: [ray.put(np.concatenate([exchanged[index][number] for index in part.tolist()])) for part in partitions]
        for number, name in enumerate(("token_ids", "sampled"))
    }
    return {}, (np.array([len(sampled) for _, sampled in exchanged], dtype=np.int64), np.array(fits), fields)


def place_outputs(
    lengths: NDArray[np.int64], arrays: TokenArrays, source: StepBatch, field: str
) -> tuple[TokenArrays, None]:
    """Place another batch's output at this one's tokens.

    Both have the same sampled tokens in one order: `source` is the step after `exchange_prompts`. `arrays`: sampled.
    """
    theirs = {
        name: gather_partitions(
            fetch_stored(source.fields[name], f"the step's {name}"), source.partitions, source.lengths
        )
        for name in ("sampled", field)
    }
    outputs = np.zeros((int(lengths.sum()), *theirs[field].shape[1:]), dtype=theirs[field].dtype)
    outputs[arrays["sampled"]] = theirs[field][theirs["sampled"]]
    return {field: outputs}, None


def choose_evenly(group_sizes: Sequence[int], count: int | None) -> list[list[int]]:
    """Choose `count` samples evenly: their indices by group; None: all."""
    total = sum(group_sizes)
    indices = np.arange(total) if count is None or count >= total else np.arange(count) * total // count
    chosen: list[list[int]] = [[] for _ in group_sizes]
    for group, index in locate_sequences([indices], group_sizes)[0]:
        chosen[group].append(index)
    return chosen


def dump_rollouts(
    groups: PackedGroups, chosen: list[list[int]], batch: StepBatch | None, file: Path, record: StepRecord
) -> None:
    """Write chosen samples to Parquet; the file appears when complete.

    `chosen` are indices in the groups. Advantages and log-probabilities come from `batch`, which has the sequences in
    the order of `groups`; None: the run does not train.
    """
    values = {} if batch is None else fetch_trained_values(batch)

    def iterate_groups() -> Iterator[tuple[int, list[tuple[Trajectory, TrainedValues]]]]:
        written = [number for number, indices in enumerate(chosen) if indices]
        # A few groups at a time: a step's trajectories need not fit into the memory of one worker.
        for begin in range(0, len(written), WRITTEN_GROUPS):
            numbers = written[begin : begin + WRITTEN_GROUPS]
            fetched = PackedGroups(groups.references, groups.indices[numbers]).fetch()
            for number, group in zip(numbers, fetched, strict=True):
                first = number * record.run.samples_per_prompt
                indices = chosen[number]
                yield number, [(group[i], select_trained_values(values, first + i, group[i])) for i in indices]

    write_rollouts(file, iterate_groups(), record.to_metadata())


def fetch_trained_values(batch: StepBatch) -> dict[str, Sequence[NDArray[np.float32]]]:
    """Fetch a step's advantages and log-probabilities so far, by name and rollout: [tokens], float32.

    A field that was lost with its process is left out.
    """
    values: dict[str, Sequence[NDArray[np.float32]]] = {}
    ends = np.cumsum(batch.sum_by_rollout(batch.lengths))[:-1]  # the segments of a rollout lie end to end
    for name in ("advantages", "prev_logprobs"):
        if name in batch.fields:
            with suppress(RayError):
                gathered = gather_partitions(ray.get(batch.fields[name]), batch.partitions, batch.lengths)
                values[name] = np.split(gathered, ends)
    if batch.advantages is not None:
        values["advantages"] = np.split(np.repeat(batch.advantages, batch.lengths), ends)
    return values


def select_trained_values(
    values: Mapping[str, Sequence[NDArray[np.float32]]], index: int, trajectory: Trajectory
) -> TrainedValues:
    """Select the values of rollout `index` at its sampled tokens."""
    spans = [np.arange(span.start, span.end) for span in trajectory.spans]
    positions = np.concatenate([np.empty(0, dtype=np.int64), *spans])
    return {name: by_rollout[index][positions] for name, by_rollout in values.items()}
