"""Atomic writes of files, and files of JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON under a temporary name, then rename: readers see the old file or the new one."""
    write_text(path, json.dumps(replace_non_finite(value), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text under a temporary name, then rename: readers see the old file or the new one."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file under a temporary name, which is renamed when all of it is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def format_json_line(value: dict[str, Any]) -> str:
    """One line of JSON, from which floats are read back exactly.

    Infinities and NaN become null, because JSON has neither.
    """
    return json.dumps(replace_non_finite(value)) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a file of JSON lines; empty when there is no such file.

    A last line without a line break was cut off by the end of its process and is left out.

    Raises:
        ValueError: a line is not a JSON object; the message names file and line.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is damaged, no line of JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number} is damaged: it holds {type(row).__name__}, and no object")
        rows.append(row)
    return rows


def replace_non_finite(value: Any, digits: int | None = None) -> Any:
    """Replace non-finite floats in a value by None, and round the others to `digits` significant digits if given."""
    if isinstance(value, float):
        return (value if digits is None else float(f"{value:.{digits}g}")) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_non_finite(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item, digits) for item in value]
    return value


METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
STARTS_FILE = "starts.jsonl"
SUMMARY_FILE = "summary.json"


def open_to_append(path: Path, last_step: int) -> TextIO:
    """Open a file of JSON lines to append to, after dropping the lines whose "step" is after `last_step`."""
    if path.exists():
        write_text(path, "".join(format_json_line(row) for row in read_lines(path) if row["step"] <= last_step))
    return path.open(
        "a", buffering=1, encoding="utf-8"
    )  # line-buffered: the line of a step is written before the next step begins
