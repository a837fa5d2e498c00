"""Reads a JSONL file of prompts line by line and says which lines cannot be used, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_grpo.config.errors import Problem

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
    """Blank lines do not count."""
    tasks: set[str] = field(default_factory=set)
    """Environments that its rows are for."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong with them, each under its file:line."""


def examine(path: Path, data: RowFormat, environments: set[str]) -> FileReport:
    """Read a file of prompts line by line."""
    report, bad = FileReport(), 0
    for number, row in read_rows(path, data, environments):
        report.rows += 1
        if not isinstance(row, str):
            report.tasks.add(row.get("task_name", data.task_name))
            continue
        bad += 1
        if bad <= _SHOWN:
            report.problems.append(Problem(f"{path}:{number}", row))
    if bad > _SHOWN:
        report.problems.append(Problem(str(path), f"{bad - _SHOWN} more bad lines of {report.rows}"))
    return report


def read_rows(path: Path, data: RowFormat, environments: set[str]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The number of each line that is not blank, with what `read_row` makes of it."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, read_row(line, data, environments)


def read_row(line: bytes, data: RowFormat, environments: set[str]) -> dict[str, Any] | str:
    """The row that a line holds, or as text what keeps it from being one."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    except json.JSONDecodeError as error:
        return f"is not valid JSON: {error.msg} at column {error.colno}; is the file truncated?"
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
    return row


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(turn) for turn in value)


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
