"""What a step's file of rollouts says beside them, so that a run can train on the files alone; and reading it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_grpo.data.rollout_files import ROLLOUTS_FOLDER, rows_of_file, step_files
from megatron_grpo.data.trajectory import Outcome, Trajectory

METADATA_KEY = b"megatron_grpo"
"""Key of the Parquet file's own metadata."""
_TOKEN_IDS = "token_ids.list.element"
_FIELDS = frozenset(one.name for one in fields(Trajectory))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What all steps of a recorded run have in common."""

    prompts_per_step: int
    """Prompts that a step trains on."""
    samples_per_prompt: int
    max_num_steps: int
    """Steps that the run was to make, on which learning-rate schedules depend."""
    vocab: int
    """Tokens of the model."""
    vocabulary: str | None
    """Digest of the tokens with their numbers (`vocabulary_digest`); None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of the sampling of a step beside the rollouts that it trains on."""

    position: dict[str, Any]
    """State of the loader of training prompts after the step (JSON)."""
    longest: int
    """Tokens of the longest sequence."""
    dropped: list[Outcome] = field(default_factory=list)
    """What dynamic sampling dropped: no rollout of it is in the file, and metrics of sampling count it."""
    carried: int = 0
    """The first groups that were sampled before a run was resumed, and counted by then."""
    dynamic_sampling: dict[str, float] = field(default_factory=dict)
    """Metrics of dynamic sampling; empty where there was none."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything that a step's file says beside its rollouts."""

    run: RunFacts
    step: StepFacts

    def metadata(self) -> dict[bytes, bytes]:
        """The record as metadata of a Parquet file."""
        return {METADATA_KEY: json.dumps({"run": asdict(self.run), "step": asdict(self.step)}).encode()}

    @staticmethod
    def from_metadata(metadata: Mapping[bytes, bytes] | None) -> StepRecord:
        """The inverse of `metadata`.

        Raises:
            ValueError: there is no such metadata, or it is of another version.
        """
        try:
            found = json.loads((metadata or {})[METADATA_KEY])
            step = found["step"]
            dropped = [Outcome(**one) for one in step["dropped"]]
            return StepRecord(RunFacts(**found["run"]), StepFacts(**{**step, "dropped": dropped}))
        except (LookupError, TypeError, ValueError):
            raise ValueError("was written by another version, which recorded other things") from None


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """What the end of a file says of it, without its rollouts being read."""

    record: StepRecord
    rollouts: int
    largest_token: int | None
    """Largest token id of any rollout; None: the file does not say."""


def recorded_steps(path: str | Path) -> dict[int, Path]:
    """The files of a recording by step, in the order of the steps.

    Args:
        path: folder of a run, or its folder of rollouts.
    """
    return {step: file for step, file in step_files(recorded_folder(path)) if file.suffix == ".parquet"}


def recorded_folder(path: str | Path) -> Path:
    """The folder of rollouts of a recording that is named by this folder or by that of the run."""
    inside = Path(path) / ROLLOUTS_FOLDER
    return inside if inside.is_dir() else Path(path)


def examine_file(file: Path) -> RecordedFile:
    """Look at the end of a step's file.

    Raises:
        ValueError: it is damaged or of another version; the text goes on after the file's name.
        OSError: it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"is damaged or was not written to its end: {str(error).splitlines()[0]}") from None
    largest = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(index) for index in range(group.num_columns)]
        largest += [one.statistics for one in columns if one.path_in_schema == _TOKEN_IDS]
    known = bool(largest) and all(one is not None and one.has_min_max for one in largest)
    record = StepRecord.from_metadata(metadata.metadata)
    return RecordedFile(record, metadata.num_rows, max(one.max for one in largest) if known else None)


def read_recorded(file: Path) -> tuple[StepFacts, list[list[Trajectory]]]:
    """All of a step's file: what is known of its sampling, and its rollouts, a list for each prompt.

    Raises:
        ValueError: it is damaged or of another version; the text goes on after the file's name.
        OSError: it cannot be read.
    """
    import pyarrow as pa

    record = examine_file(file).record
    try:
        rows = [{name: value for name, value in row.items() if name in _FIELDS} for row in rows_of_file(0, file)]
    except pa.ArrowException as error:
        raise ValueError(f"is damaged: {str(error).splitlines()[0]}") from None
    trajectories = [Trajectory.from_row(row) for row in rows]
    return record.step, [list(group) for _, group in groupby(trajectories, key=lambda one: one.group)]
