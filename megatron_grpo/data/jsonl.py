"""Reading files of prompts; imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_grpo.config.rows import row_error
from megatron_grpo.data.interfaces import TaskDataSpec


def read_prompts(path: str | Path, spec: TaskDataSpec, *, task_names: set[str]) -> list[dict[str, Any]]:
    """All rows of a JSONL file of prompts; blank lines are skipped.

    Args:
        path: the file.
        spec: names of the columns, and the task of rows without a task_name column.
        task_names: tasks that have an environment.

    Returns:
        The rows as they are, in the order of the file.

    Raises:
        ValueError: the file cannot be read, has no rows, or a line is no row that can be used (see `row_error`); the
            message names file and line.
    """
    rows = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        wrong = row_error(line, spec, task_names)
        if wrong is not None:
            raise ValueError(f"{path}:{number}: the row {wrong}")
        rows.append(json.loads(line))
    if not rows:
        raise ValueError(f"{path}: has no rows")
    return rows
