"""Reading files of prompts; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_grpo.data.interfaces import TaskDataSpec
from megatron_grpo.data.rows import read_rows


def read_prompts(path: str | Path, spec: TaskDataSpec, *, task_names: set[str]) -> list[dict[str, Any]]:
    """All rows of a JSONL file of prompts; blank lines are skipped.

    Args:
        path: the JSONL file of prompts.
        spec: names of the columns, and the task of rows without a task_name column.
        task_names: tasks that have an environment.

    Returns:
        The rows as they are, in the order of the file.

    Raises:
        ValueError: the file cannot be read, has no rows, or a line is no row that can be used (see `read_row`); the
            message names file and line.
    """
    rows = []
    try:
        for number, row in read_rows(Path(path), spec, task_names):
            if isinstance(row, str):
                raise ValueError(f"{path}:{number}: the row {row}")
            rows.append(row)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if not rows:
        raise ValueError(f"{path}: has no rows")
    return rows
