"""Sets of rows in every kind of file, by number and as a whole; malformed ones never end in a traceback."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_grpo.config.schema import DataConfig, DatasetConfig, TaskConfig
from megatron_grpo.data.examine import Examined, examined
from megatron_grpo.data.sources import open_source

ROWS = [{"prompt": f"{n}?", "answer": f"{n:03d}", "level": str(n % 3)} for n in range(12)]
KINDS = {"math": "math"}


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=5)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.name == "file.arrow":
        with pa.ipc.new_file(path, table.schema) as sink:
            sink.write_table(table)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(path, table.schema) as sink:
            sink.write_table(table)
    elif path.name == "saved":
        Dataset(table).save_to_disk(path)
    else:
        DatasetDict({"train": Dataset(table), "other": Dataset(table.slice(3, 2))}).save_to_disk(path)
    return path


def looked(path: Path, data: DataConfig | None = None, **config: Any) -> Examined:
    return examined(DatasetConfig(path=str(path), **config), data or DataConfig(), KINDS)


NAMES = ["a.jsonl", "a.parquet", "a.csv", "a.tsv", "file.arrow", "stream.arrow", "saved", "splits"]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_has_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    source = open_source(DatasetConfig(path=str(path)))
    assert len(source) == 12
    assert [source[number] for number in (7, 0, 11)] == [ROWS[7], ROWS[0], ROWS[11]]
    assert list(source.each()) == ROWS
    report = looked(path).report
    assert (report.rows, report.bad, report.problems, report.duplicates) == (12, 0, [], 0)
    assert report.columns == {"math": {"prompt", "answer", "level"}}
    assert str(path) in source.place(4)


def test_a_split_of_a_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "splits")
    assert list(open_source(DatasetConfig(path=str(path), split="other")).each()) == ROWS[3:5]
    (problem,) = looked(path, split="train[").report.problems
    assert "has no split 'train['" in problem.text


def test_a_quoted_line_break_is_part_of_a_value(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [{"prompt": "a\nb", "answer": "007"}, {"prompt": 'say "x"', "answer": ""}])
    assert next(iter(open_source(DatasetConfig(path=str(path))).each())) == {"prompt": "a\nb", "answer": "007"}
    (problem,) = looked(path).report.problems
    assert (problem.subject, problem.text[:22]) == (f"{path}:4", "column 'answer' (data.")


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_bad_rows_are_named_counted_and_left_out(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "a.jsonl"
    good = [json.dumps(row) for row in ROWS]
    path.write_text("\n".join([*good[:2], "{broken", "", *good[2:4], *["[]"] * 7, *good[:2]]) + "\n")
    found = looked(path, DataConfig(bad_rows=policy))  # type: ignore[arg-type]
    named = found.report.problems if policy == "fail" else found.report.remarks
    assert [problem.subject for problem in named[:5]] == [f"{path}:{line}" for line in (3, 7, 8, 9, 10)]
    assert named[0].text.startswith("is not valid JSON")
    assert named[5].text == "3 more bad lines of 14"
    assert (found.report.rows, found.report.bad, found.report.duplicates) == (6, 8, 2)
    assert found.source is not None
    assert [found.source[number]["prompt"] for number in found.usable] == ["0?", "1?", "2?", "3?", "0?", "1?"]
    assert bool(found.report.problems) == (policy == "fail")
    assert "have too" not in str(found.report.problems)
    assert any("2 rows, of 6, whose prompt an earlier row has too" in one.text for one in found.report.remarks)


def test_lines_of_a_csv_with_other_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,answer\n1?,1\n2?,2,3\n\n3?,3\n")
    found = looked(path, DataConfig(bad_rows="skip"))
    assert found.report.remarks[0].subject == f"{path}:3"
    assert found.report.remarks[0].text == "has 3 values, and the header names 2 columns"
    assert found.report.rows == 2


def test_tasks_have_forms_and_keys_of_their_own(tmp_path: Path) -> None:
    rows = [
        {"problem": "1+1", "solution": "it is \\boxed{2}", "task_name": "math"},
        {"q": "write", "task_name": "code", "answer": "x"},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    data = DataConfig(tasks={"math": TaskConfig(processor="math"), "code": TaskConfig(prompt_key="q")})
    report = examined(DatasetConfig(path=str(path)), data, {"math": "math", "code": "reward_functions"}).report
    assert (report.rows, report.problems, report.tasks) == (2, [], {"math", "code"})
    assert report.columns["math"] == {"problem", "solution", "task_name", "prompt", "answer"}


TEXT = st.text(max_size=12)
VALUE = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.lists(TEXT, max_size=2))
LIKE_ROWS = st.dictionaries(st.sampled_from(["prompt", "answer", "task_name", "x"]), VALUE, max_size=4)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content"]), VALUE, max_size=2), max_size=3)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Files that are rows, nearly rows, or anything."""
    rows = draw(st.lists(st.one_of(LIKE_ROWS, MESSAGES, VALUE), max_size=6))
    content = "\n".join(json.dumps(row) for row in rows).encode()
    if draw(st.booleans()):
        content = b"prompt,answer\n" + content
    if draw(st.booleans()):
        place = draw(st.integers(0, len(content)))
        content = content[:place] + draw(st.binary(max_size=8)) + content[place + draw(st.integers(0, 4)) :]
    return content


def table_of(kind: str) -> bytes:
    sink = io.BytesIO()
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), sink)
    else:
        with pa.ipc.new_file(sink, pa.Table.from_pylist(ROWS).schema) as writer:
            writer.write_table(pa.Table.from_pylist(ROWS))
    return sink.getvalue()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=files(), suffix=st.sampled_from([".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ""]))
def test_no_text_ends_in_a_traceback(tmp_path: Path, content: bytes, suffix: str) -> None:
    check_file(tmp_path / f"fuzz{suffix}", content)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), suffix=st.sampled_from([".parquet", ".arrow"]))
def test_no_damaged_table_ends_in_a_traceback(tmp_path: Path, data: st.DataObject, suffix: str) -> None:
    content = bytearray(table_of(suffix))
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    check_file(tmp_path / f"fuzz{suffix}", bytes(content[: data.draw(st.integers(0, len(content)))]))


def check_file(path: Path, content: bytes) -> None:
    """Every row is used, or is bad; every message can be printed."""
    path.write_bytes(content)
    for policy in ("fail", "skip"):
        found = looked(path, DataConfig(bad_rows=policy))  # type: ignore[arg-type]
        for problem in [*found.report.problems, *found.report.remarks]:
            f"{problem.subject} {problem.text}".encode()
        if found.source is None:
            assert found.report.problems, "a set that cannot be read is told"
            continue
        assert found.report.rows + found.report.bad == len(found.source)
        assert found.report.rows == len(found.usable)
        assert (policy == "fail" and found.report.bad > 0) == bool(found.report.problems)
        for number in found.usable:
            assert found.source[int(number)].get("prompt")
