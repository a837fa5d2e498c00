"""Files that are never half written, and lines of JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON under a temporary name, then rename: readers see the old file or the new one."""
    write_text(path, json.dumps(_finite(value), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text under a temporary name, then rename: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def json_line(value: dict[str, Any]) -> str:
    """One line of JSON; floats are written so that reading them gives back equal numbers.

    JSON has no infinities and no NaN: they become null.
    """
    return json.dumps(_finite(value)) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none when there is no such file.

    A last line without a line break was cut off by the end of its process and is left out.
    """
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
