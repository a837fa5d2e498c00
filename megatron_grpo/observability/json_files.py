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

    Raises:
        ValueError: a line is no object; the text names file and line.
    """
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    return [_object(line, f"{path}:{number}") for number, line in enumerate(whole, start=1)]


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is damaged, no line of JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{place} is damaged: it holds {type(value).__name__}, and no object")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
