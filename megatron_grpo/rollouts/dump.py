"""Writing the rollouts of a step into a file, in the rollout worker that is asked to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from megatron_grpo.data.recording import StepRecord
from megatron_grpo.data.rollout_files import Learnt, Written, write_rollouts
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.rollouts.payloads import Payloads
from megatron_grpo.rollouts.shards import gather_shards

DUMPED_GROUPS = 64
"""Groups that are fetched together to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntFrom:
    """What a step knows of its sequences by now, for a message: arrays, and references to arrays.

    Not the step's batch itself, whose module would have every worker import torch.
    """

    lengths: NDArray[np.int64]
    """[sequences], int64: tokens of each."""
    sequences: Sequence[NDArray[np.int64]]
    """Per shard [sequences of the shard], int64: their numbers in the step."""
    shards: Sequence[Mapping[str, Any]]
    """Per shard, by name of an entry, a reference to an array [tokens of the shard]."""
    advantages: NDArray[np.float32] | None
    """[sequences], float32; None: advantages differ by token and are an entry of the shards, or are not known yet."""

    def learnt(self) -> _Learnt:
        """Everything that is written of it, fetched; what is lost with the process that held it counts as not known."""
        arrays: dict[str, NDArray[np.float32]] = {}
        for name in ("advantages", "prev_logprobs"):
            if name in self.shards[0]:
                with suppress(RayError):
                    stored = [{name: array} for array in ray.get([shard[name] for shard in self.shards])]
                    arrays |= gather_shards(stored, self.sequences, self.lengths, [name])
        return _Learnt(np.cumsum(self.lengths) - self.lengths, self.advantages, arrays)


@dataclass(frozen=True, slots=True)
class _Learnt:
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


def dump(payloads: Payloads, chosen: list[list[int]], known: LearntFrom | None, file: Path, record: StepRecord) -> None:
    """Write trajectories into a Parquet file, which appears when it is complete.

    Args:
        payloads: the groups of the step, in its order.
        chosen: for each group, which of its samples to write.
        known: what the step knows of the same sequences, which count group by group; None: it learns nothing.
        file: where.
        record: what the file says beside them.
    """

    def groups() -> Iterator[tuple[int, list[Written]]]:
        each, learnt = payloads.each(), None if known is None else known.learnt()
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
