"""Malformed files of every kind: each row is used or told, each message can be printed, nothing ends in a traceback."""

import decimal
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.schema import DataConfig
from megatron_grpo.data.rows import examine_set

KINDS = {"math": "math"}
ROWS = [{"prompt": f"{n}?", "answer": f"{n:03d}", "level": str(n % 3)} for n in range(12)]
TABLES = [".parquet", ".arrow"]
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

TEXT = st.text(max_size=12)
VALUE = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.lists(TEXT, max_size=2))
LIKE_ROWS = st.dictionaries(st.sampled_from(["prompt", "answer", "task_name", "x"]), VALUE, max_size=4)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content"]), VALUE, max_size=2), max_size=3)

COLUMNS: list[pa.Array] = [
    pa.array(["1?", "", None]),
    pa.array(["1", "1/2", "\u00e9\U0001f600"], pa.large_string()),
    pa.array(["1", "2", "3"], pa.string_view()),
    pa.array([b"1", b"\xff", None]),
    pa.array([b"abc", b"\x00\x00\x00", None], pa.binary(3)),
    pa.array([1, None, -1]),
    pa.array([2**64 - 1, 0, 1], pa.uint64()),
    pa.array([float("nan"), float("inf"), 1e300]),
    pa.array([True, False, None]),
    pa.nulls(3),
    pa.array([decimal.Decimal("1.5"), None, decimal.Decimal("2.0")]),
    pa.array([datetime(2026, 1, 1, tzinfo=UTC), None, datetime(1, 1, 1, tzinfo=UTC)]),
    pa.array([2**62, 0, None], pa.timestamp("ns")),
    pa.array([timedelta(1), None, timedelta(-1)]),
    pa.array([10, None, -(2**31)], pa.date32()),
    pa.array(["math", "other", "math"]).dictionary_encode(),
    pa.array([["1"], [], None]),
    pa.array([[["1"], None], [], None]),
    pa.array([{"role": "user", "content": "1?"}, {"role": None, "content": "x"}, None]),
    pa.array([[{"role": "user", "content": "1?"}], [{"role": "user", "content": None}], []]),
    pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
    pa.array([{}, None, {}], pa.struct([])),
]
"""Three rows of nearly every type that a table can hold."""


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Files of text that are rows, nearly rows, or anything."""
    rows = draw(st.lists(st.one_of(LIKE_ROWS, MESSAGES, VALUE), max_size=6))
    content = "\n".join(json.dumps(row) for row in rows).encode()
    if draw(st.booleans()):
        content = b"prompt,answer\n" + content
    if draw(st.booleans()):
        offset = draw(st.integers(0, len(content)))
        content = content[:offset] + draw(st.binary(max_size=8)) + content[offset + draw(st.integers(0, 4)) :]
    return content


@st.composite
def any_tables(draw: st.DrawFn) -> pa.Table:
    """Tables that are whole, with columns of any type and name, also of one name."""
    columns = draw(st.lists(st.sampled_from(COLUMNS), min_size=0, max_size=4))
    names = [draw(st.sampled_from(["prompt", "answer", "task_name", "x", ""])) for _ in columns]
    return pa.Table.from_arrays(columns, names=names)


def table_of(suffix: str, table: pa.Table, compression: str | None = None, stream: bool = False) -> bytes:
    """The bytes of a file that holds a table."""
    sink = io.BytesIO()
    if suffix == ".parquet":
        pq.write_table(table, sink, row_group_size=5, compression=compression or "none", use_dictionary=stream)
    else:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=5)
    return sink.getvalue()


@settings(max_examples=150, suppress_health_check=QUIET)
@given(content=texts(), suffix=st.sampled_from([".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ""]))
@example(content=b'prompt,answer\n"1', suffix=".csv")
@example(content=b"\xef\xbb\xbfprompt,answer\r\n1?,1\r\n", suffix=".csv")
@example(content=b"prompt,answer\n\x00,1\n", suffix=".csv")
@example(content=b"[" * 100_000, suffix=".jsonl")
@example(content=b'{"prompt": ' + b"9" * 5000 + b"}", suffix=".jsonl")
def test_no_text_ends_in_a_traceback(tmp_path: Path, content: bytes, suffix: str) -> None:
    check_file(tmp_path / f"fuzz{suffix}", content)


@settings(max_examples=80, suppress_health_check=QUIET)
@given(
    data=st.data(),
    suffix=st.sampled_from(TABLES),
    compression=st.sampled_from([None, "zstd"]),
    stream=st.booleans(),
)
def test_no_damaged_table_ends_in_a_traceback(
    tmp_path: Path, data: st.DataObject, suffix: str, compression: str | None, stream: bool
) -> None:
    content = bytearray(table_of(suffix, pa.Table.from_pylist(ROWS), compression, stream))
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    check_file(tmp_path / f"fuzz{suffix}", bytes(content[:end]))


@settings(max_examples=50, suppress_health_check=QUIET)
@given(table=any_tables(), suffix=st.sampled_from(TABLES))
def test_no_table_of_other_types_ends_in_a_traceback(tmp_path: Path, table: pa.Table, suffix: str) -> None:
    try:
        content = table_of(suffix, table)
    except pa.ArrowException:  # Parquet has no such type
        return
    check_file(tmp_path / f"fuzz{suffix}", content)


def check_file(path: Path, content: bytes) -> None:
    """Every row is used, or is bad; every message can be printed."""
    path.write_bytes(content)
    for policy in ("fail", "skip"):
        report = examine_set(DatasetConfig(path=str(path)), DataConfig(bad_rows=policy), KINDS)  # type: ignore[arg-type]
        print_all([*report.problems, *report.remarks])
        if report.source is None:
            assert report.problems, "a set that cannot be read is told"
            continue
        assert report.rows + report.bad_count == len(report.source)
        assert report.rows == len(report.usable)
        assert (policy == "fail" and report.bad_count > 0) == bool(report.problems)
        for number in report.usable:
            assert report.source[int(number)].get("prompt")


def print_all(problems: Sequence[Any]) -> None:
    for problem in problems:
        f"{problem.subject} {problem.text}".encode()
