"""Parquet files of the rollouts of each step, with a record of the step for replays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.rollout_checks import choose_batch_rows, find_file_problem, require_possible
from megatron_grpo.batch.trajectory import Outcome, Trajectory
from megatron_grpo.config.errors import select_first_line
from megatron_grpo.config.outside_files import require_regular

if TYPE_CHECKING:
    import pyarrow as pa


ROLLOUTS_FOLDER = "rollouts"
VALIDATION_FOLDER = "validation"  # responses of validations, by the number of steps before
ROWS_FOLDER = "rows"  # rows of the data that a step learns from, in the form of rollouts
_STEP_FILE = re.compile(r"step_(0|[1-9][0-9]{0,17})\.parquet")
_ARRAYS = ("token_ids", "logprobs", "prev_logprobs", "advantages")  # a value for each token or sampled token
ROW_GROUP_TOKENS = 4 * 2**20  # tokens that are gathered in memory before they are written as a row group


TrainedValues = Mapping[str, NDArray[np.float32]]
"""Values of a rollout's sampled tokens from training, [sampled tokens]: `advantages`, and `prev_logprobs` under the
policy at the start of the step. A value is missing if no step trains on the rollout or needs it, or it failed before.
"""


def locate_rollouts_file(run_dir: Path, step: int, folder: str = ROLLOUTS_FOLDER) -> Path:
    return run_dir / folder / f"step_{step}.parquet"


def drop_rollouts_after(run_dir: Path, last_step: int) -> None:
    """Remove the files of later steps, and unfinished files."""
    for folder in (run_dir / ROLLOUTS_FOLDER, run_dir / VALIDATION_FOLDER, run_dir / ROWS_FOLDER):
        for step, file in find_recorded_steps(folder).items():
            if step > last_step:
                file.unlink()
        for file in folder.glob(".step_*"):
            file.unlink()


def read_rollouts(
    run_dir: Path | str, step: int | None = None, kind: Literal["rollouts", "validation", "rows"] = "rollouts"
) -> Iterator[dict[str, Any]]:
    """Read a run's rollouts, of one step or of all in order.

    Yields a dict with the step, the fields of `Trajectory` and `TrainedValues` (None: missing) for each; `prompt`,
    `answer` and `columns` are of the row that it was sampled for. Token ids and values of tokens are arrays (int32,
    float32), spans lists of [start, end, weight version]. `kind`: rollouts that a step learns from, responses of the
    validation after a step, or rows of the data that a step learns from. Raises FileNotFoundError if there is no such
    run, or no file of this step.
    """
    folder = Path(run_dir) / kind
    files = {number: file for number, file in find_recorded_steps(folder).items() if step is None or number == step}
    if not files:
        raise FileNotFoundError(f"{folder} has no {kind}{'' if step is None else f' of step {step}'}")
    return chain.from_iterable(read_rows(number, file) for number, file in files.items())


def write_rollouts(
    file: Path,
    groups: Iterable[tuple[int, Sequence[tuple[Trajectory, TrainedValues]]]],
    metadata: Mapping[bytes, bytes] | None = None,
) -> None:
    """Write trajectories as Parquet, completely or not at all.

    `groups` are pairs of the number to write as `group`, and the group's rollouts, each with its values in
    training.
    """
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}")
    schema = _make_schema().with_metadata(metadata)
    # Row groups are large, because readers pay for each, and bounded, because one is held in memory.
    if unfinished.is_symlink():  # in a folder from elsewhere, and leads to a file of the user's
        unfinished.unlink()
    with pq.ParquetWriter(unfinished, schema, compression="zstd", compression_level=1) as writer:
        rows: list[tuple[int, Trajectory, TrainedValues]] = []
        tokens = 0
        for number, rollouts in groups:
            rows += [(number, trajectory, values) for trajectory, values in rollouts]
            tokens += sum(trajectory.tokens for trajectory, _ in rollouts)
            if tokens >= ROW_GROUP_TOKENS:
                writer.write_table(_make_table(rows))
                rows, tokens = [], 0
        if rows:
            writer.write_table(_make_table(rows))
    with unfinished.open("rb") as handle:  # the step is reported only when its file is on disk
        os.fsync(handle.fileno())
    unfinished.rename(file)


def _make_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        {
            "prompt_idx": pa.int64(),
            "group": pa.int32(),
            "sample": pa.int32(),
            "token_ids": pa.list_(pa.int32()),
            "segment_tokens": pa.list_(pa.int32()),
            "spans": pa.list_(pa.list_(pa.int64())),
            "logprobs": pa.list_(pa.float32()),
            "prev_logprobs": pa.list_(pa.float32()),
            "advantages": pa.list_(pa.float32()),
            "response": pa.string(),
            "stop_reason": pa.string(),
            "engine": pa.int32(),
            "reward": pa.float64(),
            "reward_parts": pa.map_(pa.string(), pa.float64()),
            "turn_rewards": pa.list_(pa.float64()),
            "turn_tokens": pa.list_(pa.int32()),
            "reward_errors": pa.int32(),
            "reward_metrics": pa.map_(pa.string(), pa.float64()),
            "notes": pa.map_(pa.string(), pa.string()),
            "prompt": pa.string(),
            "answer": pa.string(),
            "columns": pa.map_(pa.string(), pa.string()),
            "correct": pa.bool_(),
            "loss_multiplier": pa.float64(),
            "fault": pa.string(),
            "failure": pa.string(),
            "task_name": pa.string(),
            "images": pa.list_(pa.struct({"digest": pa.string(), "rows": pa.int32(), "columns": pa.int32()})),
            "segment_images": pa.list_(pa.int32()),
        }
    )


def _make_table(rows: Sequence[tuple[int, Trajectory, TrainedValues]]) -> pa.Table:
    import pyarrow as pa

    def make_lists(arrays: Sequence[NDArray[Any] | None]) -> pa.ListArray | list[None]:
        complete = [array for array in arrays if array is not None]
        if len(complete) < len(arrays):
            return [None] * len(arrays)
        # From flat arrays, so that no Python object is made for each number.
        return pa.ListArray.from_arrays(np.cumsum([0, *map(len, complete)], dtype=np.int32), np.concatenate(complete))

    schema = _make_schema()
    numbers, trajectories, trained = zip(*rows, strict=True)
    columns: dict[str, Any] = {
        "group": numbers,
        "token_ids": make_lists([trajectory.token_ids for trajectory in trajectories]),
        "logprobs": make_lists([trajectory.logprobs for trajectory in trajectories]),
        "prev_logprobs": make_lists([values.get("prev_logprobs") for values in trained]),
        "advantages": make_lists([values.get("advantages") for values in trained]),
        "spans": [[list(span) for span in trajectory.spans] for trajectory in trajectories],
        "reward_parts": [list(trajectory.reward_parts.items()) for trajectory in trajectories],
        "reward_metrics": [list(trajectory.reward_metrics.items()) for trajectory in trajectories],
        "notes": [list(trajectory.notes.items()) for trajectory in trajectories],
        "columns": [list(trajectory.columns.items()) for trajectory in trajectories],
        "images": [[image._asdict() for image in trajectory.images] for trajectory in trajectories],
    }
    for name in schema.names:
        if name not in columns:
            columns[name] = [getattr(trajectory, name) for trajectory in trajectories]
    return pa.table({name: pa.array(columns[name], type=schema.field(name).type) for name in schema.names})


DAMAGE_ADVICE = "copy it again from where the run wrote it, or move it out of the folder"  # end of a message


def read_rows(step: int, file: Path, *, is_trained: bool = False) -> Iterator[dict[str, Any]]:
    """Read one file's rollouts lazily, as `read_rollouts`; ValueError if it is damaged.

    is_trained: they are trained on, so those whose rewards or log-probabilities are not finite are damage, too.
    """
    with _translate_damage(file):
        yield from _decode_rows(step, file, is_trained=is_trained)


@contextmanager
def _translate_damage(file: Path | None = None) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, LookupError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # pyarrow's have none
            raise
        problem = f"is damaged or was not written to its end: {select_first_line(error)}"
        # Without a file the caller puts its name in front.
        raise ValueError(problem if file is None else f"{file} {problem}; {DAMAGE_ADVICE}") from None


def _decode_rows(step: int, file: Path, *, is_trained: bool) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    require_regular(file)
    with pq.ParquetFile(file) as opened:
        problem = find_file_problem(file, opened.metadata, opened.schema_arrow, _make_schema())
        if problem is not None:
            raise ValueError(problem)
        metadata = opened.metadata.metadata
        run = StepRecord.from_metadata(metadata).run if METADATA_KEY in (metadata or {}) else None
        number, last_group = 0, 0
        for batch in opened.iter_batches(batch_size=choose_batch_rows(opened.metadata)):
            plain = batch.select([name for name in batch.schema.names if name not in _ARRAYS])
            arrays = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in _ARRAYS}
            for index, row in enumerate(plain.to_pylist(maps_as_pydicts="strict")):
                row |= {name: column[index] for name, column in arrays.items()}
                number += 1
                require_possible(row, number, last_group, run, is_trained=is_trained)
                last_group = row["group"]
                if not row.get("images"):  # a rollout of text has no such entry
                    row.pop("images", None)
                yield {"step": step, **row}


def count_rollouts(file: Path) -> int:
    """Count the rollouts of a file; raises as `read_rows`."""
    import pyarrow.parquet as pq

    with _translate_damage(file):
        require_regular(file)
        rows: int = pq.read_metadata(file).num_rows
    return rows


METADATA_KEY = b"megatron_grpo"  # key of the Parquet file's own metadata
_TOKEN_IDS_COLUMN = "token_ids.list.element"  # path in the schema of Parquet


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts that all steps of a recorded run share."""

    prompts_per_step: int  # prompts that a step trains on
    samples_per_prompt: int
    max_num_steps: int  # planned, because learning-rate schedules depend on it
    vocab: int  # size: number of tokens in the model's vocabulary
    vocabulary: str | None  # digest of the tokens and their ids (`compute_vocabulary_digest`); None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts about the sampling of a step."""

    position: dict[str, Any]  # state of the loader of training prompts after the step (JSON)
    longest: int  # tokens of the longest sequence
    dropped: list[Outcome] = field(default_factory=list)  # by dynamic sampling: not in the file, but in metrics
    carried: int = 0  # groups, first in the file, that were sampled, and counted in metrics, before the run was resumed
    dynamic_sampling: dict[str, float] = field(default_factory=dict)  # metrics of dynamic sampling; empty without it


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Metadata of a step's file."""

    run: RunFacts
    step: StepFacts

    def to_metadata(self) -> dict[bytes, bytes]:
        return {METADATA_KEY: json.dumps({"run": asdict(self.run), "step": asdict(self.step)}).encode()}

    @staticmethod
    def from_metadata(metadata: Mapping[bytes, bytes] | None) -> StepRecord:
        """Invert `to_metadata`; ValueError if there is none, or of another version."""
        from pydantic import TypeAdapter

        try:
            return TypeAdapter(StepRecord).validate_json((metadata or {})[METADATA_KEY], strict=True)
        except (LookupError, ValueError):
            raise ValueError("was written by another version, which recorded other things") from None


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """Summary of a file without reading its rollouts."""

    record: StepRecord
    rollouts: int
    largest_token: int | None  # largest token id of any rollout; None: the file has no statistics


def find_recorded_steps(path: str | Path) -> dict[int, Path]:
    """Find the files of a run's rollouts, sorted by step."""
    files = find_recorded_folder(path).glob("step_*.parquet")
    numbered = ((_STEP_FILE.fullmatch(file.name), file) for file in files)  # copies have names such as "step_1 (2)"
    return dict(sorted((int(match[1]), file) for match, file in numbered if match))


def find_recorded_folder(path: str | Path) -> Path:
    """Find the folder of rollouts; `path` is that folder, or the run's."""
    folder = Path(path) / ROLLOUTS_FOLDER
    return folder if folder.is_dir() else Path(path)


def examine_file(file: Path) -> RecordedFile:
    """Read the metadata of a step's file.

    Raises ValueError if it is damaged or of another version, and OSError if it cannot be read. Callers put the file's
    name in front of the message ("is damaged ...").
    """
    import pyarrow.parquet as pq

    with _translate_damage():
        require_regular(file)
        metadata = pq.read_metadata(file)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    # The largest token tells whether the rollouts fit a model's vocabulary, without reading them.
    statistics = [column.statistics for column in columns if column.path_in_schema == _TOKEN_IDS_COLUMN]
    has_largest = bool(statistics) and all(chunk is not None and chunk.has_min_max for chunk in statistics)
    record = StepRecord.from_metadata(metadata.metadata)
    return RecordedFile(record, metadata.num_rows, max(chunk.max for chunk in statistics) if has_largest else None)


def read_recorded_rollouts(file: Path) -> tuple[StepFacts, list[list[Trajectory]]]:
    """Read a step's facts and rollouts, by prompt, to train on them.

    Raises as `examine_file`; rewards and log-probabilities that are not finite are damage, too.
    """
    record = examine_file(file).record
    with _translate_damage():
        trajectories = [Trajectory.from_row(row) for row in _decode_rows(0, file, is_trained=True)]
    # The samples of a prompt are neighbours in the file.
    return record.step, [list(group) for _, group in groupby(trajectories, key=lambda trajectory: trajectory.group)]
