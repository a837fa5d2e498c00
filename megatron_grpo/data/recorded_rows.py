"""Rows to learn from that an earlier run sampled: rollouts of its files, chosen by their rewards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch import rollout_files as files
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.data_schema import DataConfig

RECORDED = "<recorded>"  # key, in a row, of a recorded sequence; no column has this name


@dataclass(frozen=True, slots=True)
class RecordedSequence:
    """Tokens of a rollout's segment, as the engines sampled them.

    Example: RecordedSequence("runs/a/rollouts/step_3.parquet, prompt 17, sample 2", token_ids, [(3, 5)], "42")
    """

    origin: str  # file, prompt, sample and segment, for messages
    token_ids: NDArray[np.int32]  # prompt and responses: [tokens], int32
    spans: list[tuple[int, int]]  # beginning and end of the tokens that were sampled
    response: str

    def to_row(self) -> dict[str, Any]:
        return {RECORDED: self}


class RecordedRows:
    """A run's recorded rollouts as rows (`sources.Source`), one for each segment.

    Rollouts without a reward, or without a sampled token, are left out.
    """

    media: Mapping[str, str] = {}

    def __init__(self, data: DataConfig) -> None:
        """Read and choose rollouts; ValueError: a file cannot be read, or there is none."""
        assert data.from_rollouts is not None
        self.name = data.from_rollouts
        steps = files.find_recorded_steps(self.name)
        if not steps:
            text = "has no rollouts/step_N.parquet; give the folder of a run that recorded them (logger.rollouts=all)"
            raise ValueError(text)
        rows = itertools.chain.from_iterable(
            _choose_rollouts(file, files.read_rows(step, file, is_trained=True), data) for step, file in steps.items()
        )
        self._sequences = list(rows)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        return self._sequences[number].to_row()

    def read_all(self) -> Iterator[dict[str, Any] | str]:
        """Read all rows in order."""
        return (sequence.to_row() for sequence in self._sequences)

    def locate(self, number: int) -> str:
        """Locate a row for messages."""
        return self._sequences[number].origin


def _choose_rollouts(file: Path, rows: Iterator[dict[str, Any]], data: DataConfig) -> Iterator[RecordedSequence]:
    """Choose the rollouts of a step's file by data.min_reward and data.best_of_group."""
    for _, group in itertools.groupby(rows, key=lambda row: row["group"]):
        usable = [row for row in group if row["reward"] is not None and row["failure"] is None and row["spans"]]
        if data.best_of_group:  # the first of those with the highest reward
            usable = sorted(usable, key=lambda row: -row["reward"])[:1]
        for row in usable:
            if data.min_reward is None or row["reward"] >= data.min_reward:
                yield from _read_segments(f"{file}, prompt {row['prompt_idx']}, sample {row['sample']}", row)


def _read_segments(origin: str, row: Mapping[str, Any]) -> Iterator[RecordedSequence]:
    """Read a rollout's segments, each with its own context."""
    segments = Trajectory.from_row(row).split_segments()
    for number, segment in enumerate(segments, start=1):
        if segment.spans:
            yield RecordedSequence(
                origin=origin if len(segments) == 1 else f"{origin}, segment {number}",
                token_ids=segment.token_ids,
                spans=[(span.start, span.end) for span in segment.spans],
                response=segment.response,
            )


def split_sequence(sequence: RecordedSequence) -> Iterator[tuple[list[int], bool]]:
    """Split a sequence's tokens where sampling began and ended; True: sampled."""
    cuts: Sequence[int] = sorted({0, len(sequence.token_ids), *itertools.chain.from_iterable(sequence.spans)})
    for begin, end in itertools.pairwise(cuts):
        is_sampled = any(first <= begin and end <= last for first, last in sequence.spans)
        yield sequence.token_ids[begin:end].tolist(), is_sampled
