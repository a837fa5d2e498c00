"""Reads a JSONL file of prompts line by line and says which lines cannot be used, and why."""

from __future__ import annotations

import json
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


def row_problems(path: Path, data: RowFormat, environments: set[str]) -> tuple[int, list[Problem]]:
    """Rows of the file (blank lines do not count) and what is wrong with them, each under its file:line."""
    problems: list[Problem] = []
    rows = bad = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            rows += 1
            wrong = row_error(line, data, environments)
            if wrong is not None:
                bad += 1
                if bad <= _SHOWN:
                    problems.append(Problem(f"{path}:{number}", wrong))
    if bad > _SHOWN:
        problems.append(Problem(str(path), f"{bad - _SHOWN} more bad lines of {rows}"))
    return rows, problems


def row_error(line: bytes, data: RowFormat, environments: set[str]) -> str | None:
    """What keeps one line from being a row; None when it is one."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    except json.JSONDecodeError as error:
        return f"is not valid JSON: {error.msg} at column {error.colno}; is the file truncated?"
    if not isinstance(row, dict):
        return f"is {type(row).__name__}, not an object {{...}}"
    for setting, column in (("prompt_key", data.prompt_key), ("answer_key", data.answer_key)):
        if column is not None and column not in row:
            return f"has no column {column!r} (data.{setting}); it has {', '.join(row) or 'none'}"
    prompt = row[data.prompt_key]
    if isinstance(prompt, list) and not data.apply_chat_template:
        return f"column {data.prompt_key!r} is a list of messages, which needs data.apply_chat_template=true"
    if not ((isinstance(prompt, str) and prompt) or _is_conversation(prompt)):
        return f"column {data.prompt_key!r} is neither a text nor a list of {{role, content}} messages"
    task = row.get("task_name", data.task_name)
    if task not in environments:
        return f"task_name {task!r} is no environment; env has {', '.join(sorted(environments))}"
    return None


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(turn) for turn in value)


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
