"""Files of rollouts from elsewhere that hold what no run writes: refused with the place, before work is done."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_grpo.batch import rollout_checks
from megatron_grpo.batch.images import StoredImage
from megatron_grpo.batch.rollout_files import (
    METADATA_KEY,
    RunFacts,
    StepFacts,
    StepRecord,
    examine_file,
    find_recorded_steps,
    locate_rollouts_file,
    read_recorded_rollouts,
    read_rows,
    write_rollouts,
)
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.data_schema import DataConfig
from megatron_grpo.data.recorded_rows import RecordedRows
from tests.support.trajectories import failed_trajectory, make_trajectory, with_learnt

IMAGE = StoredImage("0" * 64, 2, 2)
RECORD = StepRecord(
    RunFacts(prompts_per_step=1, samples_per_prompt=1, max_num_steps=1, vocab=16, vocabulary=None),
    StepFacts(position={}, longest=4, dropped=[make_trajectory(reward=math.nan).outcome]),
)


def write(folder: Path, *, trained: Any = None, **changes: Any) -> Path:
    trajectory = make_trajectory(3)
    for name, value in changes.items():
        setattr(trajectory, name, value)
    file = locate_rollouts_file(folder, 1)
    write_rollouts(file, [(0, [(trajectory, trained or {})])], RECORD.to_metadata())
    return file


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token_ids": np.array([1, -7, 3, 4], dtype=np.int32)}, "the token -7"),
        ({"token_ids": np.array([1, 2_000_000_000, 3, 4], dtype=np.int32)}, "the token 2000000000, .* has 16 tokens"),
        ({"spans": [Span(1, 400, 0)]}, r"the span \[1, 400, 0\], which does not follow the others among its 4 tokens"),
        ({"spans": [Span(-3, 0, 0)]}, r"the span \[-3, 0, 0\]"),
        ({"spans": [Span(0, 3, 0)]}, r"the span \[0, 3, 0\]"),
        ({"spans": [Span(3, 1, 0)]}, r"the span \[3, 1, 0\]"),
        ({"spans": [Span(1, 3, 0), Span(2, 3, 0)]}, r"the span \[2, 3, 0\]"),
        ({"spans": [(1, 4)]}, r"the span \[1, 4\], which is not start, end and version"),
        ({"spans": []}, "3 logprobs of 0 sampled tokens"),
        ({"logprobs": np.zeros(1, dtype=np.float32)}, "1 logprobs of 3 sampled tokens"),
        ({"segment_tokens": [400, 1]}, r"segments of \[400, 1\] tokens, and 4 tokens"),
        ({"segment_tokens": [-1, 5]}, r"segments of \[-1, 5\] tokens, and 4 tokens"),
        ({"segment_tokens": [2, 2]}, r"the span \[1, 4, 0\]"),
        ({"reward": math.inf}, "an infinite reward"),
        ({"turn_rewards": [-math.inf], "turn_tokens": [3]}, "an infinite reward"),
        ({"turn_rewards": [1.0]}, "1 rewards of turns, and 0 numbers of their tokens"),
        ({"sample": 1}, "the sample 1, and a prompt of the run has 1 samples"),
        ({"sample": -1}, "the group 0, prompt_idx 0 or sample -1, which are numbers from 0"),
        ({"loss_multiplier": 1e30}, r"the loss_multiplier 1e\+30"),
        ({"loss_multiplier": math.nan}, "the loss_multiplier nan"),
        ({"stop_reason": "tool"}, "the stop_reason tool"),
        ({"response": None}, "no response"),
        ({"task_name": None}, "no task_name"),
        ({"images": [StoredImage("../../etc/passwd", 2, 2)]}, "the image .*passwd"),
        ({"images": [StoredImage("0" * 64, 0, 2)]}, "the image .*0000"),
        ({"images": [IMAGE], "segment_images": [1]}, r"segments of \[1\] images, and 1 images"),
        ({"images": [IMAGE], "segment_tokens": [2, 2]}, r"segments of \[\] images, and 1 images"),
        ({"images": [IMAGE], "segment_tokens": [2, 2], "segment_images": [1, 1]}, r"segments of \[1, 1\] images"),
        ({"images": [IMAGE], "segment_tokens": [2, 2], "segment_images": [2, -1]}, r"segments of \[2, -1\] images"),
        ({"trained": {"advantages": np.zeros(9, dtype=np.float32)}}, "9 advantages of 3 sampled tokens"),
    ],
)
def test_an_impossible_rollout_is_named(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    file = write(tmp_path, **changes)
    with pytest.raises(
        ValueError, match=rf"^{file} is damaged .*: row 1, prompt 0, sample -?[0-9] has {text}.*; copy it again"
    ):
        list(read_rows(1, file))
    with pytest.raises(ValueError, match=f"^is damaged .*: row 1, prompt 0, sample -?[0-9] has {text}"):
        read_recorded_rollouts(file)


@pytest.mark.parametrize("group", [-1, 1, 2**31 - 1])
def test_a_group_that_the_step_has_not_is_named(group: int, tmp_path: Path) -> None:
    file = locate_rollouts_file(tmp_path, 1)
    write_rollouts(file, [(group, [(make_trajectory(3), {})])], RECORD.to_metadata())
    with pytest.raises(ValueError, match=rf"row 1, prompt 0, sample 0 has the group {group}, "):
        list(read_rows(1, file))


def test_groups_are_neighbours_in_order(tmp_path: Path) -> None:
    """The samples of a prompt that stand apart would be two groups."""
    file = locate_rollouts_file(tmp_path, 1)
    write_rollouts(file, [(number, with_learnt(make_trajectory(2))) for number in (0, 1, 0)])
    with pytest.raises(ValueError, match="row 3, prompt 0, sample 0 has the group 0 behind the group 1"):
        list(read_rows(1, file))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"logprobs": np.array([-1, math.nan, 0.5], dtype=np.float32)},
            "the log-probability nan at its sampled token 2",
        ),
        (
            {"logprobs": np.array([-math.inf, 0, 0], dtype=np.float32)},
            "the log-probability -inf at its sampled token 1",
        ),
        ({"logprobs": np.array([0, 0, math.inf], dtype=np.float32)}, "the log-probability inf at its sampled token 3"),
        ({"reward": math.nan}, "the reward nan"),
        ({"reward_parts": {"form": 1.0, "judge": math.nan}}, "the reward_parts.judge nan"),
    ],
)
def test_numbers_that_are_not_finite_are_looked_at_and_not_trained_on(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    file = write(tmp_path, **changes)
    (row,) = read_rows(1, file)
    assert {name: str(row[name]) for name in changes} == {name: str(value) for name, value in changes.items()}
    with pytest.raises(ValueError, match=f"row 1, prompt 0, sample 0 has {text}$"):
        read_recorded_rollouts(file)
    with pytest.raises(ValueError, match=f"^{file} is damaged .*: row 1, prompt 0, sample 0 has {text}; copy it again"):
        RecordedRows(DataConfig(from_rollouts=str(tmp_path)))


def test_wrong_numbers_of_a_run_stay_readable(tmp_path: Path) -> None:
    """Such as a log-probability above 0, and advantages that ended the run."""
    wrong = {name: np.array([math.nan, math.inf, 0.0], dtype=np.float32) for name in ("advantages", "prev_logprobs")}
    file = write(tmp_path, logprobs=np.array([0.5, -1.0, -2.0], dtype=np.float32), trained=wrong)
    (row,) = read_rows(1, file)
    assert str(row["prev_logprobs"].tolist()) == "[nan, inf, 0.0]"
    assert len(read_recorded_rollouts(file)[1]) == 1
    parts = [make_trajectory(2, prompt_tokens=2, segment_tokens=[4]), failed_trajectory(prompt_tokens=3)]
    write_rollouts(file, [(0, with_learnt(*parts, prev=True))])
    assert len(list(read_rows(1, file))) == 2


def replace_column(file: Path, name: str, values: Any) -> None:
    table = pq.read_table(file)
    number = table.schema.names.index(name)
    pq.write_table(table.set_column(number, name, pa.array(values)), file)


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("token_ids", ["1234"], "its column token_ids is string, not list<item: int32>"),
        ("spans", [[1, 4, 0]], "its column spans is list"),
        ("reward", ["9"], "its column reward is string, not double"),
        ("response", [b"\xff"], "its column response is binary, not string"),
        ("notes", ["x"], "its column notes is string"),
        ("token_ids", pa.array([[1, None, 3, 4]], type=pa.list_(pa.int32())), "sample 0 has no number at some tokens"),
        ("token_ids", pa.array([None], type=pa.list_(pa.int32())), "sample 0 has no token_ids"),
        ("reward_parts", pa.array([None], type=pa.map_(pa.string(), pa.float64())), "sample 0 has no reward_parts"),
        ("notes", pa.array([None], type=pa.map_(pa.string(), pa.string())), "sample 0 has no notes"),
        ("spans", pa.array([[[1, None, 0]]], type=pa.list_(pa.list_(pa.int64()))), r"the span \[1, None, 0\]"),
    ],
)
def test_columns_of_other_types_are_named(name: str, values: Any, text: str, tmp_path: Path) -> None:
    file = write(tmp_path)
    replace_column(file, name, values)
    with pytest.raises(ValueError, match=text):
        list(read_rows(1, file))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    file = write(tmp_path)
    pq.write_table(pq.read_table(file).drop_columns(["reward"]), file)
    with pytest.raises(ValueError, match="it has no column reward"):
        list(read_rows(1, file))


def test_sizes_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes are a gigabyte of equal tokens."""
    file = write(tmp_path)
    tokens = pa.ListArray.from_arrays([0, 3_000_000], pa.array(np.zeros(3_000_000, dtype=np.int32)))
    replace_column(file, "token_ids", tokens)
    assert file.stat().st_size < 30_000
    monkeypatch.setattr(rollout_checks, "MAX_VALUES", 2**20)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("the file was read"))
    with pytest.raises(ValueError, match=r"3000000 values of token_ids.* in a row group, and at most 1048576 are read"):
        list(read_rows(1, file))


def test_long_texts_are_read_few_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = locate_rollouts_file(tmp_path, 1)
    write_rollouts(file, [(0, with_learnt(*[make_trajectory(1, response="x" * 10_000)] * 5))])
    metadata = pq.read_metadata(file)
    assert rollout_checks.choose_batch_rows(metadata) == rollout_checks.BATCH_ROWS
    monkeypatch.setattr(rollout_checks, "MAX_BATCH_BYTES", 25_000)
    assert rollout_checks.choose_batch_rows(metadata) == 2
    assert [len(row["response"]) for row in read_rows(1, file)] == [10_000] * 5


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"run": {}, "step": {}}',
        RECORD.to_metadata()[METADATA_KEY].replace(b'"vocab": 16', b'"vocab": "16"'),
        RECORD.to_metadata()[METADATA_KEY].replace(b'"longest": 4', b'"longest": [4]'),
    ],
)
def test_a_record_of_another_form_is_refused(record: bytes, tmp_path: Path) -> None:
    file = write(tmp_path)
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: record}), file)
    with pytest.raises(ValueError, match="was written by another version"):
        examine_file(file)
    with pytest.raises(ValueError, match="was written by another version"):
        list(read_rows(1, file))


def test_copies_of_files_are_no_steps(tmp_path: Path) -> None:
    folder = write(tmp_path).parent
    for name in ("step_x", "step_1 (2)", "step_01", "step_²", "step_", "step_" + "9" * 200):
        (folder / f"{name}.parquet").touch()
    assert list(find_recorded_steps(tmp_path)) == [1]


def test_a_column_of_equal_values_that_takes_no_space_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_checks, "FREE_VALUES", 1000)
    tokens = 2_000_000
    columns = {"token_ids": np.ones(tokens + 1, dtype=np.int32), "logprobs": np.zeros(tokens, dtype=np.float32)}
    file = write(tmp_path, spans=[Span(1, tokens + 1, 0)], **columns)
    assert file.stat().st_size < 50_000
    with pytest.raises(
        ValueError, match=r"2000001 values of token_ids\.list\.element in \d+ bytes, which no run writes"
    ):
        list(read_rows(1, file))
    different = np.random.default_rng(0).normal(size=3000).astype(np.float32)
    columns = {"token_ids": np.ones(3001, dtype=np.int32), "logprobs": different}
    assert len(list(read_rows(1, write(tmp_path, spans=[Span(1, 3001, 0)], **columns)))) == 1
