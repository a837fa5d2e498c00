"""Reading JSONL files of prompts, with errors that name file and line; imports nothing heavy, so that a configuration can be
checked with it before any process starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_grpo.data.interfaces import TaskDataSpec


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a JSONL file with their line numbers (from 1); blank lines are skipped.

    Raises:
        ValueError: there is no such file, or a line is not UTF-8 or no JSON object; the message names file and line.
    """
    try:
        file = open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}") from None
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8 text: {error.reason}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
            yield number, row


def read_prompts(path: str | Path, spec: TaskDataSpec, *, task_names: set[str] | None = None) -> list[dict[str, Any]]:
    """All rows of a file of prompts, checked.

    Args:
        path: JSONL file.
        spec: names of the columns, and the task of rows without a task_name column.
        task_names: tasks that have an environment; None: any.

    Returns:
        The rows as they are, in the order of the file.

    Raises:
        ValueError: no rows, or a bad one: not JSON, no prompt or answer, a prompt of the wrong form, an unknown task. The
            message names file and line.
    """
    rows = []
    for number, row in read_jsonl(path):
        problem = _problem(row, spec, task_names)
        if problem:
            raise ValueError(f"{path}:{number}: {problem}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: has no rows")
    return rows


def _problem(row: dict[str, Any], spec: TaskDataSpec, task_names: set[str] | None) -> str | None:
    for key in (spec.prompt_key, spec.answer_key):
        if key not in row:
            return f'no column "{key}"; the row has {", ".join(row) or "none"}'
    prompt = row[spec.prompt_key]
    if isinstance(prompt, list):
        if not spec.apply_chat_template:
            return f'"{spec.prompt_key}" is a list of messages, which needs data.apply_chat_template=true'
        if not prompt or not all(_is_message(message) for message in prompt):
            return f'"{spec.prompt_key}" must be a text or a list of {{"role": text, "content": text}}'
    elif not isinstance(prompt, str) or not prompt:
        return f'"{spec.prompt_key}" must be a text that is not empty or a list of messages'
    task = row.get("task_name", spec.task_name)
    if task_names is not None and task not in task_names:
        return f'no environment for task_name "{task}"; there is {", ".join(sorted(task_names)) or "none"}'
    return None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
