"""Sets of rows in every kind of file, by number and as a whole."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from megatron_grpo.config.data_schema import DatasetConfig, TaskConfig
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import DataConfig
from megatron_grpo.data.rows import SetReport, examine_set
from megatron_grpo.data.sources import open_source
from megatron_grpo.environments.retriever import Retriever, read_documents

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


def examine_rows(path: Path, data: DataConfig | None = None, **config: Any) -> SetReport:
    return examine_set(DatasetConfig(path=str(path), **config), data or DataConfig(), KINDS)


NAMES = ["a.jsonl", "a.parquet", "a.csv", "a.tsv", "file.arrow", "stream.arrow", "saved", "splits"]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_has_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    source = open_source(DatasetConfig(path=str(path)))
    assert len(source) == 12
    assert [source[number] for number in (7, 0, 11)] == [ROWS[7], ROWS[0], ROWS[11]]
    assert list(source.read_all()) == ROWS
    report = examine_rows(path)
    assert (report.rows, report.bad_count, report.problems, report.duplicates) == (12, 0, [], 0)
    assert report.columns == {"math": {"prompt", "answer", "level"}}
    assert str(path) in source.locate(4)


def test_a_split_of_a_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "splits")
    assert list(open_source(DatasetConfig(path=str(path), split="other")).read_all()) == ROWS[3:5]
    (problem,) = examine_rows(path, split="train[").problems
    assert "has no split 'train['" in problem.text


def test_a_quoted_line_break_is_part_of_a_value(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [{"prompt": "a\nb", "answer": "007"}, {"prompt": 'say "x"', "answer": ""}])
    assert next(iter(open_source(DatasetConfig(path=str(path))).read_all())) == {"prompt": "a\nb", "answer": "007"}
    (problem,) = examine_rows(path).problems
    assert (problem.subject, problem.text[:22]) == (f"{path}:4", "column 'answer' (data.")


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_bad_rows_are_named_counted_and_left_out(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "a.jsonl"
    good = [json.dumps(row) for row in ROWS]
    path.write_text("\n".join([*good[:2], "{broken", "", *good[2:4], *["[]"] * 7, *good[:2]]) + "\n")
    report = examine_rows(path, DataConfig(bad_rows=policy))  # type: ignore[arg-type]
    named = report.problems if policy == "fail" else report.remarks
    assert [problem.subject for problem in named[:2]] == [f"{path}:{line}" for line in (3, 7)]
    assert named[0].text.startswith("is not valid JSON")
    assert named[1].text.endswith("; 6 other rows too")
    assert (report.rows, report.bad_count, report.duplicates) == (6, 8, 2)
    assert report.source is not None
    assert [report.source[number]["prompt"] for number in report.usable] == ["0?", "1?", "2?", "3?", "0?", "1?"]
    assert bool(report.problems) == (policy == "fail")
    assert "have too" not in str(report.problems)
    assert any("2 rows, of 6, whose prompt repeats that of an earlier row" in remark.text for remark in report.remarks)


def test_lines_of_a_csv_with_other_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,answer\n1?,1\n2?,2,3\n\n3?,3\n")
    report = examine_rows(path, DataConfig(bad_rows="skip"))
    assert report.remarks[0].subject == f"{path}:3"
    assert report.remarks[0].text == "has 3 values, and the header names 2 columns"
    assert report.rows == 2


def test_tasks_have_forms_and_keys_of_their_own(tmp_path: Path) -> None:
    rows = [
        {"problem": "1+1", "solution": "it is \\boxed{2}", "task_name": "math"},
        {"q": "write", "task_name": "code", "answer": "x"},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    data = DataConfig(tasks={"math": TaskConfig(processor="math"), "code": TaskConfig(prompt_key="q")})
    report = examine_set(DatasetConfig(path=str(path)), data, {"math": "math", "code": "reward_functions"})
    assert (report.rows, report.problems, report.columns.keys()) == (2, [], {"math", "code"})
    assert report.columns["math"] == {"problem", "solution", "task_name", "prompt", "answer"}


def test_a_task_name_of_null_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{**ROWS[0], "task_name": None}, {**ROWS[1], "task_name": "math"}])
    report = examine_set(DatasetConfig(path=str(path)), DataConfig(), KINDS)
    assert (report.rows, report.problems, report.columns.keys()) == (2, [], {"math"})


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow"])
def test_a_value_that_python_cannot_hold_makes_a_bad_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    days = pa.array([0, -(2**31), 1], pa.date32())
    table = pa.table({"prompt": ["1?", "2?", "3?"], "answer": ["1", "2", "3"], "day": days})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as sink:
            sink.write_table(table)
    report = examine_rows(path, DataConfig(bad_rows="skip"))
    assert report.usable.tolist() == [0, 2]
    assert report.remarks[0].subject == f"{path}, row 1"
    assert report.remarks[0].text.startswith("has a value that cannot be read: days=-2147483648")
    assert report.source is not None
    assert report.source[2]["prompt"] == "3?"
    with pytest.raises(RunError, match="row 1: the row has a value that cannot be read"):
        report.source[1]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\u001e", "\x7f"])
def test_a_row_of_jsonl_ends_at_a_newline_alone(tmp_path: Path, mark: str) -> None:
    rows = [{"prompt": f"a{mark}b{number}", "answer": str(number)} for number in range(3)]
    text = "".join(f"{json.dumps(row, ensure_ascii=mark < chr(32))}\n" for row in rows)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode())
    source = open_source(DatasetConfig(path=str(path)))
    assert list(source.read_all()) == rows
    assert source.locate(2) == f"{path}:3"
    documents = tmp_path / "documents.jsonl"
    documents.write_bytes("".join(json.dumps(f"{mark}cat {n}", ensure_ascii=False) + "\n" for n in range(3)).encode())
    if mark >= " ":
        assert len(Retriever(read_documents(documents)).search("cat", 9)) == 3
