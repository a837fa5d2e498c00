"""Rows of a table are those of JSONL: no null-filled keys in messages and objects, no media decoded."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Audio, Dataset, Features, Image, Json, List, Value
from PIL import Image as Pillow
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.loader import open_stream
from megatron_grpo.data.processors import TaskDataSpec, math_data_processor
from megatron_grpo.data.rows import examine_set
from megatron_grpo.data.sources import open_source
from megatron_grpo.data.table_values import StreamedRows

CALL = {"type": "function", "function": {"name": "calc", "arguments": {"expression": "2+2"}}}
LOOK_UP = {"type": "function", "function": {"name": "search", "arguments": {"query": "cats"}}}
ROWS: list[dict[str, Any]] = [
    {
        "prompt": [
            {"role": "system", "content": "You may call tools."},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "4", "name": "calc"},
            {"role": "assistant", "content": "It is 4.", "reasoning_content": "easy"},
            {"role": "user", "content": "And cats?"},
        ],
        "answer": "6",
        "hint": None,
        "extra": {"level": 3, "source": {"page": 7}},
        "tools": [{"type": "function", "function": {"name": "calc", "parameters": {"expression": {"type": "string"}}}}],
    },
    {
        "prompt": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "", "tool_calls": [LOOK_UP]},
            {"role": "tool", "content": "none", "tool_call_id": "c1"},
            {"role": "user", "content": "So?"},
        ],
        "answer": "2",
        "hint": "think",
        "extra": {"author": "x", "source": {"line": 1}},
        "tools": [{"type": "function", "function": {"name": "search", "parameters": {"query": {"type": "string"}}}}],
    },
    {"prompt": [{"role": "user", "content": "5?"}], "answer": "5", "hint": None, "extra": {}, "tools": []},
]

PRINTS_KEYS = (
    "{% for m in messages %}[{{ m.role }}{% if m.name is defined %} name={{ m.name }}{% endif %}]"
    "{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% if 'reasoning_content' in m %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{% if 'tool_calls' in m %}{{ m.tool_calls | length }}:"
    "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endif %}"
    "{% if m.tool_call_id is defined %}({{ m.tool_call_id }}){% endif %}\n{% endfor %}"
)
NULL_CONTENT = (
    "{% for m in messages %}{{ m.role }}"
    "{% if m['content'] is none %} calls{% else %} {{ m['content'] }}{% endif %}\n{% endfor %}"
)
ITEMS = (  # a null content may be printed as nothing, which is what all templates mean by it
    "{% for m in messages %}{% for key in m | sort %}{{ key }}={{ m[key] | string if m[key] else '' }};{% endfor %}\n"
    "{% endfor %}"
)


def write_table(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    table = Dataset.from_list(rows)
    if path.suffix == ".parquet":
        table.to_parquet(str(path))
    elif path.name == "as_datasets_writes.jsonl":
        table.select_columns(["prompt", "answer", "hint"]).to_json(str(path))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.data.table.schema) as sink:
            sink.write_table(table.data.table)
    else:
        table.save_to_disk(str(path))
    return path


def tokenizer(template: str) -> Any:
    core = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template)


def prompts(path: Path, template: str) -> list[Any]:
    spec = TaskDataSpec(task_name="math")
    source = open_source(DatasetConfig(path=str(path)))
    data = AllTaskProcessedDataset(source, tokenizer(template), spec, {"math": (spec, math_data_processor)}, 10**6)
    return [data[number] for number in range(len(source))]


TABLES = ["rows.parquet", "rows.arrow", "saved"]


@pytest.mark.parametrize("name", [*TABLES, "as_datasets_writes.jsonl"])
@pytest.mark.parametrize("template", [PRINTS_KEYS, NULL_CONTENT, ITEMS])
def test_prompts_are_those_of_the_rows_as_they_were_written(tmp_path: Path, name: str, template: str) -> None:
    own_tokenizer = tokenizer(template)
    expected = [own_tokenizer.apply_chat_template(row["prompt"], tokenize=False) for row in ROWS]
    for file in ("rows.jsonl", name):
        rendered = prompts(write_table(tmp_path / file), template)
        assert [prompt["message_log"][0]["content"] for prompt in rendered] == expected


@pytest.mark.parametrize("name", TABLES)
def test_environments_get_the_same_from_every_file(tmp_path: Path, name: str) -> None:
    by_file = []
    for file in ("rows.jsonl", name):
        rendered = prompts(write_table(tmp_path / file), PRINTS_KEYS)
        by_file.append([(prompt["prompt"], prompt["extra_env_info"]) for prompt in rendered])
    assert by_file[0] == by_file[1]
    assert by_file[1][0][0] == ROWS[0]["prompt"]
    assert [info["hint"] for _, info in by_file[1]] == [None, "think", None], "a column may be null"
    assert {"tools", "extra"} <= by_file[1][0][1].keys()


@pytest.mark.parametrize("name", ["rows.jsonl", *TABLES])
def test_the_check_before_a_start_sees_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name)
    report = examine_set(DatasetConfig(path=str(path)), DataConfig(), {"math": "math"})
    assert (report.problems, report.rows) == ([], 3)
    assert report.source is not None
    assert list(report.source.read_all()) == ROWS == [report.source[number] for number in range(3)]


def test_a_content_that_is_null_needs_tool_calls(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": None}], "answer": "1"},
        ROWS[1],
    ]
    path = write_table(tmp_path / "rows.parquet", [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows])
    report = examine_set(DatasetConfig(path=str(path)), DataConfig(), {"math": "math"})
    assert [problem.text for problem in report.problems] == [
        "column 'prompt' has a message (number 2) whose content is null; it must be text"
    ]


def test_lists_keep_their_nulls_and_json_columns_their_types(tmp_path: Path) -> None:
    features = Features({"prompt": Value("string"), "numbers": List(Value("int64")), "any": Json()})
    rows = [{"prompt": "a", "numbers": [1, None], "any": {"x": [None, "2"]}}, {"prompt": "b", "numbers": [], "any": 3}]
    Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "a.parquet"))
    source = open_source(DatasetConfig(path=str(tmp_path / "a.parquet")))
    assert list(source.read_all()) == rows


def test_streamed_rows_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    streamed = Dataset.from_parquet(str(write_table(tmp_path / "rows.parquet"))).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: streamed)
    rows = open_stream(DatasetConfig(path="someone/some_set"))
    assert list(rows) == ROWS == list(rows)


def broken_image(_: int) -> dict[str, Any]:
    return {"bytes": b"not an image", "path": None}


def good_image(number: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    Pillow.new("RGB", (2, 2), (number, 0, 0)).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def media_set(path: Path, feature: Any, value: Callable[[int], Any]) -> Path:
    """A Parquet file as `datasets` writes it, made by pyarrow, which does not look at the media."""
    features = Features({"prompt": Value("string"), "answer": Value("string"), "media": feature})
    rows = [{"prompt": f"{n}?", "answer": str(n), "media": value(n)} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows, schema=features.arrow_schema), path)
    return path


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        (Image(), broken_image),
        (Image(), good_image),
        (Audio(), lambda n: {"bytes": b"no sound", "path": None}),
        (List(Image()), lambda n: [broken_image(n), good_image(n)]),
        ({"frame": Image(), "text": Value("string")}, lambda n: {"frame": broken_image(n), "text": "x"}),
    ],
    ids=["broken image", "image", "audio", "images", "image in an object"],
)
def test_media_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature: Any, value: Callable[[int], Any]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a row was decoded")

    path = media_set(tmp_path / "rows.parquet", feature, value)
    for kind in (Image, Audio):
        monkeypatch.setattr(kind, "decode_example", refuse)
    report = examine_set(DatasetConfig(path=str(path)), DataConfig(), {"math": "math"})
    assert (report.problems, report.rows) == ([], 3)
    assert report.source is not None
    row = report.source[1]
    assert (row["prompt"], row["answer"]) == ("1?", "1")
    assert _bytes_in(row["media"]) == _bytes_in(value(1))


def _bytes_in(value: Any) -> list[bytes]:
    if isinstance(value, list | dict):
        return [part for item in (value.values() if isinstance(value, dict) else value) for part in _bytes_in(item)]
    return [value] if isinstance(value, bytes) else []


@pytest.mark.parametrize(
    ("feature", "value"), [(Image(), broken_image), (Audio(), lambda n: {"bytes": b"x", "path": None})]
)
def test_media_as_prompts_are_one_problem(tmp_path: Path, feature: Any, value: Callable[[int], Any]) -> None:
    path = media_set(tmp_path / "rows.parquet", feature, value)
    report = examine_set(DatasetConfig(path=str(path)), DataConfig(prompt_key="media"), {"math": "math"})
    text = f"column 'media' (data.prompt_key) holds {type(feature).__name__} data; name a column of texts"
    assert [(problem.subject, problem.text) for problem in report.problems] == [(str(path), text)]


def test_streamed_media_are_not_decoded(tmp_path: Path) -> None:
    path = media_set(tmp_path / "rows.parquet", Image(), broken_image)
    stream = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    rows: Iterator[dict[str, Any]] = iter(StreamedRows(stream))
    assert [(row["prompt"], row["media"]["bytes"]) for row in rows] == [(f"{n}?", b"not an image") for n in range(3)]
