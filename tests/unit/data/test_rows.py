"""What keeps a file from being JSONL and a line from being a row, told by what it is instead."""

import bz2
import csv
import gzip
import json
import lzma
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.schema import DataConfig
from megatron_grpo.data.rows import SetReport, examine_set
from tests.support.forked import as_ordinary_user

ROW = b'{"prompt": "1?", "answer": "1"}\n'
KINDS = {"math": "math"}


def report_of(path: Path, content: bytes | None = None, **data: Any) -> SetReport:
    if content is not None:
        path.write_bytes(content)
    return examine_set(DatasetConfig(path=str(path)), DataConfig(train_path=str(path), **data), KINDS)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (gzip.compress(ROW, mtime=0), "is compressed with gzip"),
        (bz2.compress(ROW), "is compressed with bzip2"),
        (lzma.compress(ROW), "is compressed with xz"),
        (b"PAR1\x00\x00", "is a Parquet file"),
        (ROW.decode().encode("utf-16"), "is UTF-16 text"),
        (b"[" + ROW.strip() + b"]", "is a JSON array"),
        (json.dumps([json.loads(ROW)], indent=2).encode(), "is a JSON array"),
        (b"\n\n  [\n", "is a JSON array"),
        (json.dumps(json.loads(ROW), indent=2).encode(), "spreads an object over several lines"),
        (b"prompt,answer\n1?,1\n", "looks like a table (CSV)"),
        (b"prompt\tanswer\n1?\t1\n", "looks like a table (CSV)"),
        (b"1? -> 1\n", "is not JSONL"),
    ],
)
def test_a_file_of_another_kind_is_called_by_its_name(tmp_path: Path, content: bytes, text: str) -> None:
    (problem,) = report_of(tmp_path / "rows", content).problems
    assert problem.subject == str(tmp_path / "rows")
    assert problem.text.startswith(text)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"{'prompt': '1?', 'answer': '1'}", "; texts stand in double quotes"),
        (b'{"prompt": "1?", "ans', "; is the file truncated?"),
        (b'{"prompt": "1?"', "; is the file truncated?"),
        (b'{"prompt": "1?", "answer": 1,}', "is not valid JSON: "),
        (b'{"prompt": "1?", "answer": "\xff"}', "is not UTF-8 text"),
        (b'{"prompt": "1?", "answer": [1]}', "(data.answer_key) is a JSON array, and a response is text"),
        (b'{"prompt": "1?", "answer": NaN}', "(data.answer_key) is not a number that can be compared"),
        (b'{"prompt": "\\ud800+1", "answer": "1"}', "column 'prompt' has \\ud800, half of a pair"),
        (b'{"prompt": [{"role": "user", "content": "\\uD83D"}], "answer": "1"}', "column 'prompt' has \\ud83d"),
        (b'{"prompt": "1?", "answer": "1", "source": {"x": ["\\udc00"]}}', "column 'source' has \\udc00"),
        (b'{"prompt": "\xed\xa0\x80", "answer": "1"}', "is not UTF-8 text"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: bytes, text: str) -> None:
    (problem,) = report_of(tmp_path / "rows", ROW + line + b"\n" + ROW).problems
    assert problem.subject == f"{tmp_path}/rows:2"
    assert text in problem.text
    assert ("truncated" in problem.text) == ("truncated" in text)
    problem.text.encode()  # it can be printed


@pytest.mark.parametrize(
    "line", [b'{"prompt": "\\ud83d\\ude00\\u4e2d", "answer": "\\\\ud800"}\n', b"\xef\xbb\xbf" + ROW]
)
def test_whole_pairs_and_marks_are_text(tmp_path: Path, line: bytes) -> None:
    assert report_of(tmp_path / "rows", line).problems == []


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"question": "1?"},
            "has no column 'prompt' (data.prompt_key); it has question; did you mean data.prompt_key=question? "
            "(as in all of its 7 rows)",
        ),
        ({"prompt": "1?"}, "has no column 'answer' (data.answer_key); it has prompt (as in all of its 7 rows)"),
        ({"prompt": "1?", "answer": None}, "every prompt needs a reference answer (as in all of its 7 rows)"),
    ],
)
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_what_is_wrong_with_every_row_is_one_problem(
    tmp_path: Path, row: dict[str, Any], text: str, policy: str
) -> None:
    report = report_of(tmp_path / "rows", (json.dumps(row) + "\n").encode() * 7, bad_rows=policy)
    messages = report.problems if policy == "fail" else report.remarks
    assert messages[0].subject == str(tmp_path / "rows")
    assert messages[0].text.endswith(text)
    assert len(messages) == (1 if policy == "fail" else 2)
    assert bool(report.explain_left_out()) == (policy == "skip")
    report = report_of(tmp_path / "rows", (json.dumps(row) + "\n").encode() * 7 + ROW, bad_rows=policy)
    messages = report.problems if policy == "fail" else report.remarks
    assert messages[0].subject == f"{tmp_path}/rows:1", "one row can be used"


@pytest.mark.parametrize(
    ("kind", "answer", "text"),
    [
        ("addition", '"12 apples"', "is not the digits of a sum"),
        ("math", "[1]", "is a JSON array"),
        ("code", '"import os"', "only imports and defines"),
    ],
)
def test_the_environment_that_an_answer_does_not_fit_is_named(
    tmp_path: Path, kind: str, answer: str, text: str
) -> None:
    (tmp_path / "rows").write_bytes(b'{"prompt": "1?", "answer": %s}\n' % answer.encode())
    data = DataConfig(train_path=str(tmp_path / "rows"), task_name="sums")
    (problem,) = examine_set(DatasetConfig(path=str(tmp_path / "rows")), data, {"sums": kind}).problems
    assert text in problem.text
    assert problem.text.endswith(f"(env.sums.type={kind} compares with it)")


def test_prompts_that_are_all_the_same(tmp_path: Path) -> None:
    (remark,) = report_of(tmp_path / "rows", ROW * 3).remarks
    assert remark.text == "has the same prompt in all of its 3 rows"
    (nearly,) = report_of(tmp_path / "rows", ROW * 3 + ROW.replace(b"1?", b"2?")).remarks
    assert nearly.text == "has 2 rows, of 4, whose prompt repeats that of an earlier row"


def test_a_file_of_somebody_else() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "rows")
        assert report_of(path, ROW).problems == []
        path.chmod(0)
        texts = as_ordinary_user(lambda: [problem.text for problem in report_of(path, bad_rows="skip").problems])
        assert texts == ["cannot be read: Permission denied"]


@pytest.mark.slow
def test_a_million_rows_take_seconds_and_little_memory(tmp_path: Path) -> None:
    """Four times the rows take about four times as long."""
    seconds = []
    for rows in (25_000, 100_000):
        path = tmp_path / "rows"
        path.write_bytes(b"".join(b'{"prompt": "%d?", "answer": "%d"}\n' % (n, n) for n in range(rows)))
        begin = time.process_time()
        report = report_of(path)
        seconds.append(time.process_time() - begin)
        assert (report.rows, report.problems) == (rows, [])
    assert seconds[1] < 8 * seconds[0]
    assert seconds[1] < 5


def test_rows_whose_tests_cannot_be_trusted_are_told(tmp_path: Path) -> None:
    answers = ["assert f(1) == 2", "assert P(1) == P(2)", "import math", "assert f(", "assert 1", "assert P(3) < P(4)"]
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": str(n), "answer": answer}) + "\n" for n, answer in enumerate(answers))
    )
    report = examine_set(DatasetConfig(path=str(path)), DataConfig(train_path=str(path)), {"math": "code"})
    assert [(answer.subject, answer.text.partition(":")[0]) for answer in report.problems] == [
        (
            f"{path}:3",
            "column 'answer' (data.answer_key) only imports and defines; a test has to call what it defines, "
            "as check(f) does",
        ),
        (f"{path}:4", "column 'answer' (data.answer_key) is not Python"),
    ]
    (remark,) = report.remarks
    assert remark.text.startswith("has 3 rows, of 4, whose tests cannot be trusted (docs/environments.md)")
    assert f"the first is {path}:2, whose tests compare P(1)" in remark.text


MESSAGES = [{"content": "It's 2+2?", "role": "user"}]


@pytest.mark.parametrize(
    "prompt",
    [json.dumps(MESSAGES), repr(MESSAGES), json.dumps(MESSAGES, indent=2), repr([{"from": "human", "value": "2+2?"}])],
)
def test_a_list_of_messages_that_is_written_as_text_is_refused(tmp_path: Path, prompt: str) -> None:
    """JSON text in JSONL, and what pandas writes into CSV."""
    row = {"prompt": prompt, "answer": "4"}
    (problem,) = report_of(tmp_path / "rows.jsonl", json.dumps(row).encode()).problems
    assert "is a list of messages written as text" in problem.text
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([row, row.values()])
    (problem,) = report_of(tmp_path / "rows.csv").problems
    assert "is a list of messages written as text" in problem.text
    plain = report_of(tmp_path / "rows.jsonl", apply_chat_template=False)
    assert plain.rows == 1, "a plain prompt may be any text"


@pytest.mark.parametrize(
    "prompt", ["[1, 2] + [3]?", 'What is wrong in [{"role": "user"}]?', "[{x: 1}] is a set?", "[]"]
)
def test_prompts_with_brackets_are_texts(tmp_path: Path, prompt: str) -> None:
    report = report_of(tmp_path / "rows.jsonl", json.dumps({"prompt": prompt, "answer": "4"}).encode())
    assert (report.rows, report.remarks) == (1, [])


def test_prompts_that_end_with_the_answer_are_told(tmp_path: Path) -> None:
    """The column `messages` of a set for supervised training, taken as the prompt."""
    answered = [*MESSAGES, {"role": "assistant", "content": "4"}]
    rows = [{"messages": MESSAGES, "answer": "4"}, {"messages": answered, "answer": "4"}]
    content = "\n".join(map(json.dumps, rows)).encode()
    (remark,) = report_of(tmp_path / "rows.jsonl", content, prompt_key="messages").remarks
    assert remark.text.startswith(
        "has 1 rows, of 2, whose prompt ends with a message of the assistant: responses go on"
    )
