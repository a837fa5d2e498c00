"""Files of a run's folder: names, atomic writes, JSON lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.config.outside_files import LINES_BYTES, parse_file_json, read_bytes

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
STARTS_FILE = "starts.jsonl"
SUMMARY_FILE = "summary.json"
TOTAL = "total"  # key of a step's whole time among the times of its phases
LARGEST = 2**1000  # of whole numbers: sums and means are floats
CLOCK_FIGURES = ("timing", "throughput")  # entries of a line that are no metrics


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_text(path, json.dumps(replace_non_finite(value), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text atomically: readers see the old file or the new one."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, and rename it once it is on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    if temporary.is_symlink():  # in a folder from elsewhere, and leads to a file of the user's
        temporary.unlink()
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The new name is in the folder, which has to reach the disk too.
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def format_json_line(row: dict[str, Any]) -> str:
    """One line of JSON, from which floats are read back exactly."""
    return json.dumps(replace_non_finite(row)) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; empty if it is missing.

    Raises ValueError if a line is not a JSON object; the message names file and line.
    """
    if not os.path.lexists(path):
        return []
    rows = []
    # A last line without a line break was cut off by the end of its process.
    for number, line in enumerate(read_bytes(path, LINES_BYTES).split(b"\n")[:-1], start=1):
        try:
            row = parse_file_json(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is damaged, no line of JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number} is damaged: it holds {type(row).__name__}, not an object")
        rows.append(row)
    return rows


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read the figures of steps from JSON lines; empty without a file.

    Raises ValueError if a line has no step, or holds something else than numbers; the message names file and line.
    """
    rows = read_lines(path)
    for number, row in enumerate(rows, start=1):
        if type(row.get("step")) is not int:
            raise ValueError(f"{path}:{number} is damaged: it has no number under step")
        for group in CLOCK_FIGURES:
            if not isinstance(row.get(group, {}), dict):
                raise ValueError(f"{path}:{number} is damaged: {group} is {type(row[group]).__name__}, not an object")
        groups = ({name: row[name] for name in row if name not in CLOCK_FIGURES}, *map(row.get, CLOCK_FIGURES))
        for name, value in chain.from_iterable(group.items() for group in groups if group):
            if not isinstance(value, int | float | None):
                raise ValueError(f"{path}:{number} is damaged: {to_text(name)} is {type(value).__name__}, not a number")
            if isinstance(value, int) and abs(value) > LARGEST:
                raise ValueError(f"{path}:{number} is damaged: {to_text(name)} is larger than any number of a run")
    return rows


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the steps of a run, each with its seconds; empty without a file.

    ValueError: as by `read_steps`, or a line lacks the seconds that every step has.
    """
    path = run_dir / METRICS_FILE
    rows = read_steps(path)
    for number, row in enumerate(rows, start=1):
        timing = row.get("timing", {})
        for name in {TOTAL: None, **timing}:
            seconds = timing.get(name)
            if seconds is None or not 0 <= seconds < math.inf:
                raise ValueError(f"{path}:{number} is damaged: it has no seconds under timing.{to_text(name)}")
    return rows


def replace_non_finite(value: Any, digits: int | None = None) -> Any:
    """Replace infinities and NaN by None; with `digits` round to so many significant ones."""
    if isinstance(value, float):
        return (value if digits is None else float(f"{value:.{digits}g}")) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_non_finite(member, digits) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(member, digits) for member in value]
    return value


def cut_lines(path: Path, last_step: int) -> None:
    """Remove the lines of later steps from a file of JSON lines."""
    if path.exists():
        write_text(path, "".join(format_json_line(row) for row in read_steps(path) if row["step"] <= last_step))
