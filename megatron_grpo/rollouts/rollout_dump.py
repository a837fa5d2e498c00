"""The file of a step's rollouts: written from groups in the object store, and read into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from megatron_grpo.batch.rollout_files import (
    StepFacts,
    StepRecord,
    TrainedValues,
    read_recorded_rollouts,
    write_rollouts,
)
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.errors import RunError
from megatron_grpo.rollouts.partitions import PackedGroups, gather_partitions, locate_sequences, store_groups

FETCHED_GROUPS = 64  # at a time, to be written


def load_rollouts(file: Path) -> tuple[StepFacts, PackedGroups]:
    """Read a step's file of rollouts; RunError if unreadable."""
    try:
        facts, groups = read_recorded_rollouts(file)
    except (OSError, ValueError) as error:
        raise RunError(f"the recorded rollouts cannot be read: {file} {error}") from None
    return facts, store_groups(groups)


def choose_evenly(group_sizes: Sequence[int], number: int | None) -> list[list[int]]:
    """Choose sequences spread evenly over all groups."""
    total = sum(group_sizes)
    indices = np.arange(total) if number is None or number >= total else np.arange(number) * total // number
    chosen: list[list[int]] = [[] for _ in group_sizes]
    for group, index in locate_sequences([indices], group_sizes)[0]:
        chosen[group].append(index)
    return chosen


def dump_rollouts(
    groups: PackedGroups, chosen: list[list[int]], batch: StepBatch | None, file: Path, record: StepRecord
) -> None:
    """Write the `chosen` samples of each group to Parquet; the file appears when complete.

    Advantages and log-probabilities come from `batch`, which has the sequences in this order; None: the run does not
    train.
    """
    values = None if batch is None else fetch_trained_values(batch)

    def add_values(trajectory: Trajectory, index: int) -> tuple[Trajectory, TrainedValues | None]:
        return trajectory, None if values is None else select_trained_values(values, index, trajectory)

    def iterate_groups() -> Iterator[tuple[int, list[tuple[Trajectory, TrainedValues | None]]]]:
        samples = record.run.samples_per_prompt
        written = [number for number, indices in enumerate(chosen) if indices]
        # A few groups at a time: a step's trajectories need not fit into the memory of one worker.
        for begin in range(0, len(written), FETCHED_GROUPS):
            numbers = written[begin : begin + FETCHED_GROUPS]
            for number, trajectories in zip(numbers, groups.select(numbers).fetch(), strict=True):
                yield number, [add_values(trajectories[index], number * samples + index) for index in chosen[number]]

    write_rollouts(file, iterate_groups(), record.to_metadata())


def fetch_trained_values(batch: StepBatch) -> dict[str, Sequence[NDArray[np.float32]]]:
    """Fetch a step's advantages and log-probabilities so far, by name and sequence: [tokens], float32.

    A field that was lost with its process is left out.
    """
    values: dict[str, Sequence[NDArray[np.float32]]] = {}
    for name in ("advantages", "prev_logprobs"):
        if name in batch.fields:
            with suppress(RayError):
                gathered = gather_partitions(ray.get(batch.fields[name]), batch.partitions, batch.lengths)
                values[name] = np.split(gathered, np.cumsum(batch.lengths)[:-1])
    if batch.advantages is not None:
        pairs = zip(batch.advantages, batch.lengths, strict=True)
        values["advantages"] = [np.broadcast_to(advantage, length) for advantage, length in pairs]
    return values


def select_trained_values(
    values: Mapping[str, Sequence[NDArray[np.float32]]], index: int, trajectory: Trajectory
) -> TrainedValues:
    """Select the values of sequence `index` at its sampled tokens."""
    spans = [np.arange(span.start, span.end) for span in trajectory.spans]
    positions = np.concatenate([np.empty(0, dtype=np.int64), *spans])
    selected = {name: by_sequence[index][positions] for name, by_sequence in values.items()}
    return TrainedValues(selected.get("advantages"), selected.get("prev_logprobs"))
