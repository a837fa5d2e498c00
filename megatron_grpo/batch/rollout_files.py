"""Files of the rollouts of each step: written and read as Parquet, with a record of the step for replays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.trajectory import ROW_FIELDS, Outcome, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa


ROLLOUTS_FOLDER = "rollouts"
_ARRAYS = ("token_ids", "logprobs", "prev_logprobs", "advantages")
"""Columns with a value for each token, or for each sampled token."""
ROW_GROUP_TOKENS = 4 * 2**20
"""Tokens that are gathered in memory before they are written as a row group."""


@dataclass(frozen=True, slots=True)
class TrainedValues:
    """Values of a rollout's sampled tokens from the step that trains on it, in the order of the spans."""

    advantages: NDArray[np.float32] | None
    """[sampled tokens], float32: advantage of each token; None: the step failed before computing them."""
    prev_logprobs: NDArray[np.float32] | None = None
    """[sampled tokens], float32: log-probability under the policy at the start of the step, as the training framework
    computes it; None: the step did not need them, or failed before."""


def locate_rollouts_file(run_dir: Path, step: int) -> Path:
    """The file of a step's rollouts."""
    return run_dir / ROLLOUTS_FOLDER / f"step_{step}.parquet"


def drop_rollouts_after(run_dir: Path, last_step: int) -> None:
    """Remove the files of later steps, and unfinished ones."""
    folder = run_dir / ROLLOUTS_FOLDER
    for step, file in find_recorded_steps(folder).items():
        if step > last_step:
            file.unlink()
    for file in folder.glob(".step_*"):
        file.unlink()


def read_rollouts(run_dir: Path | str, step: int | None = None) -> Iterator[dict[str, Any]]:
    """The rollouts that a run wrote: for each a dict with the step and the fields of `Trajectory` and `TrainedValues`.

    Token ids and values of tokens are arrays (int32, float32), spans lists of [start, end, weight version].

    Args:
        run_dir: the run's folder, which contains the folder of rollouts.
        step: read this step only; None: all steps, in order.

    Raises:
        FileNotFoundError: there is no such run, or no file of this step.
    """
    folder = Path(run_dir) / ROLLOUTS_FOLDER
    files = {number: file for number, file in find_recorded_steps(folder).items() if step is None or number == step}
    if not files:
        raise FileNotFoundError(f"{folder} has no rollouts{'' if step is None else f' of step {step}'}")
    return chain.from_iterable(read_rows(number, file) for number, file in files.items())


Written = tuple[Trajectory, TrainedValues | None]
"""A rollout with its values in the step that trains on it; None: no step trains on it."""


def write_rollouts(
    file: Path, groups: Iterable[tuple[int, Sequence[Written]]], metadata: Mapping[bytes, bytes] | None = None
) -> None:
    """Write trajectories as Parquet, compressed with zstd; the file appears when it is complete.

    Args:
        file: Parquet file to write; an existing one is replaced.
        groups: groups of rollouts, each after the number that is written as `group`.
        metadata: metadata of the file (`StepRecord`).
    """
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}")
    schema = _schema().with_metadata(metadata)
    with pq.ParquetWriter(unfinished, schema, compression="zstd", compression_level=1) as writer:
        waiting: list[tuple[int, Trajectory, TrainedValues | None]] = []
        tokens = 0
        for number, rollouts in groups:
            waiting += [(number, one, learnt) for one, learnt in rollouts]
            tokens += sum(len(one.token_ids) for one, _ in rollouts)
            if tokens >= ROW_GROUP_TOKENS:
                writer.write_table(_table(waiting))
                waiting, tokens = [], 0
        if waiting:
            writer.write_table(_table(waiting))
    with unfinished.open("rb") as written:  # the step is reported only when its file is on disk
        os.fsync(written.fileno())
    unfinished.rename(file)


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        {
            "prompt_idx": pa.int64(),
            "group": pa.int32(),
            "sample": pa.int32(),
            "token_ids": pa.list_(pa.int32()),
            "spans": pa.list_(pa.list_(pa.int64())),
            "logprobs": pa.list_(pa.float32()),
            "prev_logprobs": pa.list_(pa.float32()),
            "advantages": pa.list_(pa.float32()),
            "response": pa.string(),
            "stop_reason": pa.string(),
            "reward": pa.float64(),
            "reward_parts": pa.map_(pa.string(), pa.float64()),
            "reward_errors": pa.int32(),
            "reward_metrics": pa.map_(pa.string(), pa.float64()),
            "notes": pa.map_(pa.string(), pa.string()),
            "correct": pa.bool_(),
            "loss_multiplier": pa.float64(),
            "failure": pa.string(),
            "task_name": pa.string(),
        }
    )


def _table(rows: Sequence[tuple[int, Trajectory, TrainedValues | None]]) -> pa.Table:
    import pyarrow as pa

    def lists(arrays: list[NDArray[Any]]) -> pa.ListArray:
        """Arrays [tokens of a rollout] of one dtype as a column of lists, without a Python object for each number."""
        ends = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
        return pa.ListArray.from_arrays(ends, np.concatenate(arrays))

    def known(arrays: list[NDArray[Any] | None]) -> pa.ListArray | list[None]:
        """Arrays as a column of lists if all rollouts have one, else a column of nulls."""
        present = [one for one in arrays if one is not None]
        return lists(present) if len(present) == len(arrays) else [None] * len(arrays)

    schema = _schema()
    trajectories, learnt = [one for _, one, _ in rows], [one or TrainedValues(advantages=None) for _, _, one in rows]
    columns: dict[str, Any] = {
        "group": [number for number, _, _ in rows],
        "token_ids": lists([one.token_ids for one in trajectories]),
        "logprobs": lists([one.logprobs for one in trajectories]),
        "prev_logprobs": known([one.prev_logprobs for one in learnt]),
        "advantages": known([one.advantages for one in learnt]),
        "spans": [[[span.start, span.end, span.version] for span in one.spans] for one in trajectories],
        "reward_parts": [list(one.reward_parts.items()) for one in trajectories],
        "reward_metrics": [list(one.reward_metrics.items()) for one in trajectories],
        "notes": [list(one.notes.items()) for one in trajectories],
    }
    for name in schema.names:
        if name not in columns:
            columns[name] = [getattr(one, name) for one in trajectories]
    return pa.table({name: pa.array(columns[name], type=schema.field(name).type) for name in schema.names})


DAMAGE_ADVICE = "copy it again from where the run wrote it, or move it out of the folder"
"""End of a message about a damaged file."""


def read_rows(step: int, file: Path) -> Iterator[dict[str, Any]]:
    """The rollouts of one file as `read_rollouts` returns them, read lazily.

    Raises:
        ValueError: the file is damaged, was not written to its end, or is of another version; the text names it.
        OSError: the file cannot be read.
    """
    with _translate_damage(f"{file} ", f"; {DAMAGE_ADVICE}"):
        yield from _rows(step, file)


@contextmanager
def _translate_damage(before: str = "", after: str = "") -> Iterator[None]:
    """Turn the errors of pyarrow, which do not name the file, into a ValueError that says what is wrong with it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, LookupError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # pyarrow's have none
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{before}is damaged or was not written to its end: {reason}{after}") from None


def _rows(step: int, file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as opened:
        for batch in opened.iter_batches(batch_size=256):
            plain = batch.select([name for name in batch.schema.names if name not in _ARRAYS])
            of_tokens = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in _ARRAYS}
            for index, row in enumerate(plain.to_pylist(maps_as_pydicts="strict")):
                yield {"step": step, **row, **{name: pieces[index] for name, pieces in of_tokens.items()}}


def count_rollouts(file: Path) -> int:
    """Number of rollouts in a file, read from its metadata; errors are those of `read_rows`."""
    import pyarrow.parquet as pq

    with _translate_damage(f"{file} ", f"; {DAMAGE_ADVICE}"):
        rows: int = pq.read_metadata(file).num_rows
    return rows


METADATA_KEY = b"megatron_grpo"
"""Key of the Parquet file's own metadata."""
_TOKEN_IDS = "token_ids.list.element"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts that all steps of a recorded run share."""

    prompts_per_step: int
    """Prompts that a step trains on."""
    samples_per_prompt: int
    max_num_steps: int
    """Planned steps of the run, on which learning-rate schedules depend."""
    vocab: int
    """Number of tokens in the model's vocabulary."""
    vocabulary: str | None
    """Digest of the tokens with their numbers (`compute_vocabulary_digest`); None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts about the sampling of a step, in addition to the rollouts that it trains on."""

    position: dict[str, Any]
    """State of the loader of training prompts after the step (JSON)."""
    longest: int
    """Tokens of the longest sequence."""
    dropped: list[Outcome] = field(default_factory=list)
    """Samples that dynamic sampling dropped: their rollouts are not in the file, but metrics of sampling count them."""
    carried: int = 0
    """Number of groups, first in the file, that were sampled, and counted in metrics, before the run was resumed."""
    dynamic_sampling: dict[str, float] = field(default_factory=dict)
    """Metrics of dynamic sampling; empty without it."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Metadata of a step's file."""

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
    """Summary of a file from its metadata, without reading its rollouts."""

    record: StepRecord
    rollouts: int
    largest_token: int | None
    """Largest token id of any rollout; None: the file has no statistics."""


def find_recorded_steps(path: str | Path) -> dict[int, Path]:
    """The files of a run's rollouts by step, in the order of the steps.

    Args:
        path: folder of a run, or its folder of rollouts.
    """
    files = find_recorded_folder(path).glob("step_*.parquet")
    return dict(sorted((int(file.stem.removeprefix("step_")), file) for file in files))


def find_recorded_folder(path: str | Path) -> Path:
    """The folder of rollouts of a recording, given this folder or the run's."""
    inside = Path(path) / ROLLOUTS_FOLDER
    return inside if inside.is_dir() else Path(path)


def examine_file(file: Path) -> RecordedFile:
    """Read the metadata of a step's file.

    Raises:
        ValueError: the file is damaged or of another version; the text continues a message that begins with its name.
        OSError: the file cannot be read.
    """
    import pyarrow.parquet as pq

    with _translate_damage():
        metadata = pq.read_metadata(file)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(index) for group in groups for index in range(group.num_columns)]
    largest = [one.statistics for one in columns if one.path_in_schema == _TOKEN_IDS]
    known = bool(largest) and all(one is not None and one.has_min_max for one in largest)
    record = StepRecord.from_metadata(metadata.metadata)
    return RecordedFile(record, metadata.num_rows, max(one.max for one in largest) if known else None)


def read_recorded_rollouts(file: Path) -> tuple[StepFacts, list[list[Trajectory]]]:
    """Read a step's file: facts about its sampling, and its rollouts, a list for each prompt.

    Raises:
        ValueError: the file is damaged or of another version; the text continues a message that begins with its name.
        OSError: the file cannot be read.
    """
    record = examine_file(file).record
    with _translate_damage():
        rows = [{name: value for name, value in row.items() if name in ROW_FIELDS} for row in _rows(0, file)]
    trajectories = [Trajectory.from_row(row) for row in rows]
    return record.step, [list(group) for _, group in groupby(trajectories, key=lambda one: one.group)]
