"""Reads a JSONL file of prompts line by line and says which lines cannot be used, and why."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_grpo.config.errors import Problem, shown
from megatron_grpo.data.answers import unusable_answer
from megatron_grpo.data.file_kinds import HEAD_BYTES, wrong_kind

_SHOWN = 5
"""Bad lines of one file that are reported singly."""


class RowFormat(Protocol):
    """What has to be known of a file to check its rows; DataConfig is one."""

    @property
    def prompt_key(self) -> str: ...
    @property
    def answer_key(self) -> str | None: ...
    @property
    def task_name(self) -> str: ...
    @property
    def apply_chat_template(self) -> bool: ...


@dataclass(slots=True)
class FileReport:
    """What a file of prompts holds."""

    rows: int = 0
    """Number of rows, blank lines not counted."""
    tasks: set[str] = field(default_factory=set)
    """Names of the environments that the file's rows are for."""
    alike: bool = True
    """Whether all prompts of the file are equal."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with rows, each problem under its file:line."""


def examine(path: Path, data: RowFormat, environments: Mapping[str, str]) -> FileReport:
    """Read a file of prompts line by line.

    Args:
        path: the JSONL file of prompts.
        data: names of the columns, and the task of rows without a task_name column.
        environments: type of each, by task name.
    """
    report, bad = FileReport(), 0
    first: dict[str, Any] | None = None
    try:
        with path.open("rb") as file:
            kind = wrong_kind(file.read(HEAD_BYTES))
        if kind is not None:
            report.problems.append(Problem(str(path), kind))
            return report
        for number, row in read_rows(path, data, environments, environments):
            report.rows += 1
            if isinstance(row, str):
                bad += 1
                if bad <= _SHOWN:
                    report.problems.append(Problem(f"{path}:{number}", row))
                continue
            report.tasks.add(row.get("task_name", data.task_name))
            first = first or row
            report.alike = report.alike and row[data.prompt_key] == first[data.prompt_key]
    except OSError as error:
        report.problems.append(Problem(str(path), f"cannot be read: {error.strerror}"))
    if bad > _SHOWN:
        report.problems.append(Problem(str(path), f"{bad - _SHOWN} more bad lines of {report.rows}"))
    return report


def read_rows(
    path: Path, data: RowFormat, environments: Collection[str], kinds: Mapping[str, str] | None = None
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The number of each line that is not blank, with what `read_row` makes of it."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, read_row(line, data, environments, kinds)


def read_row(
    line: bytes, data: RowFormat, environments: Collection[str], kinds: Mapping[str, str] | None = None
) -> dict[str, Any] | str:
    """The row that a line holds, or as text what keeps it from being one.

    Args:
        line: a line of the file, with or without its end.
        data: names of the columns, and the task of rows without a task_name column.
        environments: task names that have one.
        kinds: types of environments whose answers are to be checked, by task name.
    """
    try:
        text = line.decode().removeprefix("\ufeff")
        row = json.loads(text)
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    except json.JSONDecodeError as error:
        return f"is not valid JSON: {error.msg} at column {error.colno}{_advice(error)}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        return f"is no JSON that can be read: {error}"
    if not isinstance(row, dict):
        return f"is {type(row).__name__}, not an object {{...}}"
    for setting, column in (("prompt_key", data.prompt_key), ("answer_key", data.answer_key)):
        if column is not None and column not in row:
            return f"has no column {column!r} (data.{setting}); it has {', '.join(row) or 'none'}"
    if data.answer_key is not None and row[data.answer_key] is None:
        return f"column {data.answer_key!r} (data.answer_key) is null; every prompt needs a reference answer"
    prompt = row[data.prompt_key]
    if isinstance(prompt, list) and not data.apply_chat_template:
        return f"column {data.prompt_key!r} is a list of messages, which needs data.apply_chat_template=true"
    if not ((isinstance(prompt, str) and prompt) or _is_conversation(prompt)):
        return f"column {data.prompt_key!r} is neither a text nor a list of {{role, content}} messages"
    task = row.get("task_name", data.task_name)
    if not isinstance(task, str) or task not in environments:
        return f"task_name {task!r} is no environment; env has {', '.join(sorted(environments))}"
    problem = _answer_problem(row, data.answer_key, kinds[task]) if kinds else None
    if problem is None and ("\\ud" in text or "\\uD" in text):
        problem = _broken_text(row)
    return problem or row


def _answer_problem(row: dict[str, Any], answer_key: str | None, kind: str) -> str | None:
    if answer_key is None:
        return None
    reason = unusable_answer(kind, row[answer_key])
    return f"column {answer_key!r} (data.answer_key) {reason}: {shown(json.dumps(row[answer_key]))}" if reason else None


def _advice(error: json.JSONDecodeError) -> str:
    """What to do about a line that is no JSON, as far as it can be guessed."""
    text = error.doc.rstrip()
    if text[error.pos : error.pos + 1] == "'":
        return "; texts stand in double quotes"
    cut_off = error.pos >= len(text) or error.msg.startswith("Unterminated string")
    return "; is the file truncated?" if cut_off else ""


def _broken_text(row: dict[str, Any]) -> str | None:
    """The column with half of a surrogate pair in it, which JSON can write and no text can hold."""
    for name, value in row.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            return f"column {name!r} has {half}, half of a pair that stands for one character; drop the row or the half"
    return None


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(turn) for turn in value)


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
