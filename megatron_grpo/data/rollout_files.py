"""The files that the rollouts of a step are written to, and how to read them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_grpo.data.trajectory import Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

ROLLOUTS_FOLDER = "rollouts"
ROW_GROUP_TOKENS = 4 * 2**20
"""Tokens that are laid out in memory before they are written."""


def rollouts_file(run_dir: Path, step: int) -> Path:
    """Where the rollouts of a step are written."""
    return run_dir / ROLLOUTS_FOLDER / f"step_{step}.parquet"


def drop_rollouts_after(run_dir: Path, last_step: int) -> None:
    """Remove the files of later steps, and what was left unfinished."""
    folder = run_dir / ROLLOUTS_FOLDER
    for step, file in _files(folder):
        if step > last_step:
            file.unlink()
    for file in folder.glob(".step_*"):
        file.unlink()


def read_rollouts(run_dir: Path | str, step: int | None = None) -> Iterator[dict[str, Any]]:
    """The rollouts that a run wrote, one dict with the fields of `Trajectory` and the step for each.

    Token ids and log-probabilities are arrays (int32, float32), spans lists of [start, end, weight version]. Also reads
    the JSON lines that earlier versions wrote.

    Args:
        run_dir: the run's folder, which has the folder of rollouts in it.
        step: only of this step; None: of all, in their order.

    Raises:
        FileNotFoundError: there is no such run, or no file of this step.
    """
    folder = Path(run_dir) / ROLLOUTS_FOLDER
    files = [(number, file) for number, file in _files(folder) if step is None or number == step]
    if not files:
        raise FileNotFoundError(f"{folder} has no rollouts{'' if step is None else f' of step {step}'}")
    return chain.from_iterable(_rows(number, file) for number, file in files)


def write_rollouts(file: Path, groups: Iterable[tuple[int, Sequence[Trajectory]]]) -> None:
    """Write trajectories as Parquet, compressed with zstd; the file appears when it is complete.

    Args:
        file: Parquet file to write; an existing one is replaced.
        groups: each with the number that its trajectories get as `group`.
    """
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}")
    with pq.ParquetWriter(unfinished, _schema(), compression="zstd", compression_level=1) as writer:
        waiting: list[tuple[int, Trajectory]] = []
        tokens = 0
        for number, trajectories in groups:
            waiting += [(number, one) for one in trajectories]
            tokens += sum(len(one.token_ids) for one in trajectories)
            if tokens >= ROW_GROUP_TOKENS:
                writer.write_table(_table(waiting))
                waiting, tokens = [], 0
        if waiting:
            writer.write_table(_table(waiting))
    with unfinished.open("rb") as written:  # whoever reports the step says that this is on disk
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
            "response": pa.string(),
            "stop_reason": pa.string(),
            "reward": pa.float64(),
            "reward_parts": pa.map_(pa.string(), pa.float64()),
            "correct": pa.bool_(),
            "loss_multiplier": pa.float64(),
            "failure": pa.string(),
        }
    )


def _table(rows: Sequence[tuple[int, Trajectory]]) -> pa.Table:
    import pyarrow as pa

    def lists(arrays: list[np.ndarray]) -> pa.ListArray:
        """Arrays [tokens of a rollout] of one dtype as a column of lists, without a Python object for each number."""
        ends = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
        return pa.ListArray.from_arrays(ends, np.concatenate(arrays))

    schema = _schema()
    trajectories = [one for _, one in rows]
    columns: dict[str, Any] = {
        "group": [number for number, _ in rows],
        "token_ids": lists([one.token_ids for one in trajectories]),
        "logprobs": lists([one.logprobs for one in trajectories]),
        "spans": [[[span.start, span.end, span.version] for span in one.spans] for one in trajectories],
        "reward_parts": [list(one.reward_parts.items()) for one in trajectories],
    }
    for name in schema.names:
        if name not in columns:
            columns[name] = [getattr(one, name) for one in trajectories]
    return pa.table({name: pa.array(columns[name], type=schema.field(name).type) for name in schema.names})


def _rows(step: int, file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".jsonl":
        with file.open() as lines:
            for line in lines:
                row = json.loads(line)
                yield {"step": step, **row, **_arrays(row["token_ids"], row["logprobs"])}
        return
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as opened:
        for batch in opened.iter_batches(batch_size=256):
            plain = batch.select([name for name in batch.schema.names if name not in ("token_ids", "logprobs")])
            tokens, logprobs = batch.column("token_ids"), batch.column("logprobs")
            for index, row in enumerate(plain.to_pylist(maps_as_pydicts="strict")):
                arrays = _arrays(*(list_.values.to_numpy() for list_ in (tokens[index], logprobs[index])))
                yield {"step": step, **row, **arrays}


def _arrays(token_ids: Any, logprobs: Any) -> dict[str, np.ndarray]:
    """token_ids [tokens], int32, and logprobs [sampled tokens], float32, of one rollout, by name."""
    return {"token_ids": np.asarray(token_ids, dtype=np.int32), "logprobs": np.asarray(logprobs, dtype=np.float32)}


def _files(folder: Path) -> list[tuple[int, Path]]:
    files = (file for suffix in ("parquet", "jsonl") for file in folder.glob(f"step_*.{suffix}"))
    return sorted((int(file.stem.removeprefix("step_")), file) for file in files)
