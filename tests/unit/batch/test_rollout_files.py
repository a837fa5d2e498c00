"""The files of a step's rollouts: what is written is read again, to the bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_grpo import observability
from megatron_grpo.batch import rollout_files
from megatron_grpo.batch.rollout_files import (
    drop_rollouts_after,
    locate_rollouts_file,
    read_rollouts,
    write_rollouts,
)
from megatron_grpo.batch.trajectory import Span, Trajectory
from tests.support.trajectories import failed_trajectory, make_trajectory, with_learnt

ROWS = [
    make_trajectory(3, prompt_idx=2**40, sample=1, response="42 é\n\0", correct=True, reward=1 / 3),
    make_trajectory(2, reward=math.nan, correct=None, reward_parts={"a": 1 / 3, "b": math.nan}, stop_reason="length"),
    failed_trajectory(prompt_tokens=4, failure="it raised"),
    make_trajectory(4, spans=[Span(1, 2, 3), Span(4, 5, 4)], logprobs=[-math.inf, -1e-30], loss_multiplier=0.0),
]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Arrays as lists, with their types, keys in order: for a comparison as texts, in which NaN is NaN."""
    names = [name for name, value in row.items() if isinstance(value, np.ndarray)]
    arrays = {name: (str(row[name].dtype), row[name].tolist()) for name in names}
    return json.loads(json.dumps(row | arrays, sort_keys=True))


def expected(step: int, group: int, one: Trajectory, prev: bool) -> dict[str, Any]:
    row = one.to_row()
    ((_, learnt),) = with_learnt(one, prev=prev)
    arrays: dict[str, Any] = {"token_ids": ("int32", row["token_ids"]), "logprobs": ("float32", row["logprobs"])}
    arrays["advantages"] = ("float32", learnt["advantages"].tolist())
    arrays["prev_logprobs"] = ("float32", learnt["prev_logprobs"].tolist()) if "prev_logprobs" in learnt else None
    return json.loads(json.dumps({"step": step, **row, **arrays, "group": group}, sort_keys=True))


@pytest.mark.parametrize("prev", [False, True])
@pytest.mark.parametrize("tokens", [1, 6, 1000])
def test_every_field_survives(tokens: int, prev: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_files, "ROW_GROUP_TOKENS", tokens)
    write_rollouts(
        locate_rollouts_file(tmp_path, 7),
        [(0, with_learnt(*ROWS[:2], prev=prev)), (5, with_learnt(*ROWS[2:], prev=prev))],
    )
    wanted = [expected(7, group, one, prev) for group, one in zip([0, 0, 5, 5], ROWS, strict=True)]
    assert str([plain(row) for row in read_rollouts(tmp_path, 7)]) == str(wanted)


def test_rollouts_of_a_step_that_failed_before_it_had_advantages(tmp_path: Path) -> None:
    write_rollouts(locate_rollouts_file(tmp_path, 3), [(0, [(trajectory, {}) for trajectory in ROWS])])
    rows = list(read_rollouts(tmp_path, 3))
    assert [row["advantages"] for row in rows] == [None] * len(ROWS)
    assert [row["token_ids"].tolist() for row in rows] == [one.token_ids.tolist() for one in ROWS]


def test_a_file_without_engines_is_read(tmp_path: Path) -> None:
    file = locate_rollouts_file(tmp_path, 1)
    write_rollouts(file, [(0, with_learnt(*(replace(one, engine=number) for number, one in enumerate(ROWS))))])
    assert [row["engine"] for row in read_rollouts(tmp_path, 1)] == list(range(len(ROWS)))
    pq.write_table(pq.read_table(file).drop_columns(["engine"]), file)
    assert [row["group"] for row in read_rollouts(tmp_path, 1)] == [0] * len(ROWS)
    assert Trajectory.from_row({**ROWS[0].to_row(), "engine": 1}).engine == 1


def test_the_file_is_compressed_and_has_typed_columns(tmp_path: Path) -> None:
    file = locate_rollouts_file(tmp_path, 1)
    write_rollouts(file, [(0, with_learnt(*ROWS))])
    metadata = pq.ParquetFile(file).metadata
    columns = [metadata.row_group(0).column(index) for index in range(metadata.num_columns)]
    assert {column.compression for column in columns} == {"ZSTD"}
    types = {column.path_in_schema.split(".")[0]: column.physical_type for column in columns}
    assert (types["token_ids"], types["logprobs"], types["reward"]) == ("INT32", "FLOAT", "DOUBLE")


def test_steps_come_in_their_order(tmp_path: Path) -> None:
    for step in (10, 2):
        write_rollouts(locate_rollouts_file(tmp_path, step), [(0, with_learnt(*ROWS[:1]))])
    assert [row["step"] for row in observability.read_rollouts(tmp_path)] == [2, 10]


def test_what_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    write_rollouts(locate_rollouts_file(tmp_path, 1), [(0, with_learnt(*ROWS))])
    with pytest.raises(FileNotFoundError, match="no rollouts of step 2"):
        read_rollouts(tmp_path, 2)
    with pytest.raises(FileNotFoundError, match="has no rollouts"):
        read_rollouts(tmp_path / "no_run")


def test_a_file_that_is_not_complete_does_not_appear(tmp_path: Path) -> None:
    def interrupted() -> Any:
        yield 0, with_learnt(*ROWS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rollouts(locate_rollouts_file(tmp_path, 1), interrupted())
    with pytest.raises(FileNotFoundError):
        read_rollouts(tmp_path)


def test_a_run_that_resumes_drops_what_came_after(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_rollouts(locate_rollouts_file(tmp_path, step), [(0, with_learnt(*ROWS))])
    folder = tmp_path / "rollouts"
    (folder / ".step_3.parquet").touch()
    drop_rollouts_after(tmp_path, 1)
    assert [file.name for file in folder.iterdir()] == ["step_1.parquet"]
    drop_rollouts_after(tmp_path / "no_run", 1)
