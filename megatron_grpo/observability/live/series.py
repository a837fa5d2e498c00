"""Figures of a run's steps, read as their file grows, in columns of a bounded number of points."""

from __future__ import annotations

import itertools
import math
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.config.outside_files import parse_file_json, require_regular
from megatron_grpo.observability.run_files import CLOCK_FIGURES

MOST_POINTS = 1000  # rows of columns that are sent
METRICS = "metrics"  # group of the figures that are not of the clock
MOST_FIGURES = 2000  # names of figures of a group that are read
MOST_VALUE = 1e300  # of a figure; larger ones and NaN are left out
_READ_BYTES = 2**24  # at a time
_DIGITS = 6  # significant digits that are sent

Columns = dict[str, list[Any]]  # "step" and the figures by name; None where a step lacks one


class SeriesFile:
    """Columns of a file of steps or validations, extended by each `read_more`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0  # changes when the file was written anew, as a resumed run does
        self.steps = array("q")
        self._columns: dict[str, dict[str, array[float]]] = {}  # by group and name
        self._identity: int | None = None  # inode of the file
        self._read_bytes, self._rest = 0, b""

    def read_more(self) -> None:
        """Read the appended lines of steps; others are left out."""
        try:
            require_regular(self.path, links=False)
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._identity or status.st_size < self._read_bytes:
                    self._forget(status.st_ino)
                file.seek(self._read_bytes)
                while content := file.read(_READ_BYTES):
                    self._read_bytes += len(content)
                    *lines, self._rest = (self._rest + content).split(b"\n")
                    for line in lines:
                        self._add_line(line)
        except (OSError, ValueError):
            if self._identity is not None and not os.path.lexists(self.path):
                self._forget(None)

    def select_columns(self, group: str, after: int = 0, points: int = MOST_POINTS) -> Columns:
        """Select a group's figures from row `after` on, thinned."""
        rows = slice(after, len(self.steps))
        columns = {name: values[rows] for name, values in self._columns.get(group, {}).items()}
        return reduce_columns(self.steps[rows], columns, points)

    def read_last(self, group: str, name: str, count: int = 1) -> list[float]:
        """Read the last values of a figure, oldest first, without missing ones."""
        values = self._columns.get(group, {}).get(name, array("d"))[-count:]
        return [value for value in values if math.isfinite(value)]

    def _forget(self, identity: int | None) -> None:
        self.version += 1
        self.steps, self._columns = array("q"), {}
        self._identity, self._read_bytes, self._rest = identity, 0, b""

    def _add_line(self, line: bytes) -> None:
        try:
            row = parse_file_json(line)
        except ValueError:
            return
        if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) >= 2**62:
            return
        count = len(self.steps)
        self.steps.append(row.pop("step"))
        groups = {group: row.pop(group, None) for group in CLOCK_FIGURES} | {METRICS: row}
        for group, figures in groups.items():
            columns = self._columns.setdefault(group, {})
            for name, value in figures.items() if isinstance(figures, dict) else ():
                if type(value) not in (int, float) or not abs(value) < MOST_VALUE:
                    continue
                column = columns.get(name)
                if column is None:
                    if len(columns) == MOST_FIGURES:
                        continue
                    column = columns[name] = array("d", [math.nan]) * count
                column.append(value)
            for column in columns.values():
                if len(column) == count:
                    column.append(math.nan)


def reduce_columns(steps: Sequence[int], columns: Mapping[str, Sequence[float]], points: int = MOST_POINTS) -> Columns:
    """Thin columns to about `points` rows, which keep every figure's extremes.

    The rows are cut into equal parts; a part becomes two rows, with the least and the largest value of each figure in
    the order in which they come. So a single step that stands out is still seen.
    """
    import numpy as np

    count, parts = len(steps), max(points // 2, 1)
    if count <= points:
        return {"step": list(steps)} | {name: _to_json(np.asarray(values)) for name, values in columns.items()}
    bounds = [count * part // parts for part in range(parts + 1)]
    numbers = np.asarray(steps)
    starts = np.asarray(bounds[:-1])
    ends = np.asarray(bounds[1:]) - 1
    thinned: Columns = {"step": np.stack([numbers[starts], numbers[ends]], axis=1).ravel().tolist()}
    for name, column in columns.items():
        values = np.asarray(column)
        pairs = np.full((parts, 2), np.nan)
        for part, (begin, end) in enumerate(itertools.pairwise(bounds)):
            piece = values[begin:end]
            present = piece[np.isfinite(piece)]
            if present.size:
                low, high = present.argmin(), present.argmax()
                pairs[part] = present[[min(low, high), max(low, high)]]
        thinned[name] = _to_json(pairs.ravel())
    return thinned


def _to_json(values: Any) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]
